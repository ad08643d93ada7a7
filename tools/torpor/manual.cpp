// SPDX-License-Identifier: Apache-2.0
#include "tools/torpor/manual.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace torpor::cli {
namespace {

std::vector<const CLI::App*> verb_apps(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

// For troff: a hyphen is a minus, a backslash and a leading dot are themselves.
std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '-') {
      out += "\\-";
    } else if (c == '\\') {
      out += "\\e";
    } else if ((c == '.' || c == '\'') && (out.empty() || out.back() == '\n')) {
      out += std::string("\\&") + c;
    } else {
      out += c;
    }
  }
  return out;
}

std::vector<std::string> flags_of(const CLI::App& app) {
  std::vector<std::string> flags;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) flags.push_back("--" + name);
    for (const std::string& name : option->get_snames()) flags.push_back("-" + name);
  }
  return flags;
}

std::string describe(const CLI::Option& option) {
  const bool takes_value = option.get_type_size() > 0;
  return fmt::format(".TP\n\\fB{}\\fR{}\n{}\n",
                     escaped(option.get_positional() ? option.get_name(true) : option.get_name(false, true)),
                     takes_value && !option.get_positional() ? " \\fI" + escaped(option.get_type_name()) + "\\fR" : "",
                     escaped(option.get_description()));
}

}  // namespace

std::string man_page(const CLI::App& app) {
  std::string page = fmt::format(
      ".TH TORPOR 1 \"\" \"torpor {}\"\n.SH NAME\ntorpor \\- looks into checkpoints of sleeping inference engines\n",
      TORPOR_VERSION);
  page += ".SH SYNOPSIS\n\\fBtorpor\\fR \\fIVERB\\fR [\\fIARGUMENTS\\fR]\n.SH DESCRIPTION\n" +
          escaped(app.get_description()) + "\n.SH VERBS\n";
  for (const CLI::App* verb : verb_apps(app)) {
    page += fmt::format(".SS {}\n{}\n", escaped(verb->get_name()), escaped(verb->get_description()));
    for (const CLI::Option* option : verb->get_options()) {
      if (option->get_name() != "--help") page += describe(*option);
    }
    const auto known =
        std::find_if(verbs().begin(), verbs().end(), [&](const Verb& each) { return each.name == verb->get_name(); });
    if (known != verbs().end()) page += fmt::format(".PP\n\\-\\-json: {}\n", escaped(known->json));
  }
  page += ".SH EXIT STATUS\n";
  for (const ExitCode& code : exit_codes())
    page += fmt::format(".TP\n{}\n{}\n", static_cast<int>(code.code), escaped(code.meaning));
  page +=
      ".SH ENVIRONMENT\n.TP\nNO_COLOR\nif set, nothing is coloured\n.TP\nTORPOR_KEY_FILE\nthe same as "
      "\\-\\-key\\-file\n";
  return page;
}

Json reference(const CLI::App& app) {
  Json page = {{"version", TORPOR_VERSION}, {"description", app.get_description()}, {"verbs", Json::array()}};
  for (const CLI::App* verb : verb_apps(app)) {
    Json arguments = Json::array();
    for (const CLI::Option* option : verb->get_options()) {
      if (option->get_name() == "--help") continue;
      const bool positional = option->get_positional();
      arguments.push_back({{"name", positional ? option->get_name(true) : option->get_name(false, true)},
                           {"positional", positional},
                           {"required", option->get_required()},
                           {"takes", option->get_type_size() > 0 && !positional ? option->get_type_name() : ""},
                           {"repeats", option->get_expected_max() > 1},
                           {"default", option->get_default_str()},
                           {"environment", option->get_envname()},
                           {"text", option->get_description()}});
    }
    const auto known =
        std::find_if(verbs().begin(), verbs().end(), [&](const Verb& each) { return each.name == verb->get_name(); });
    page["verbs"].push_back({{"name", verb->get_name()},
                             {"text", verb->get_description()},
                             {"arguments", arguments},
                             {"json", known == verbs().end() ? "" : known->json}});
  }
  page["exit_codes"] = Json::array();
  for (const ExitCode& each : exit_codes())
    page["exit_codes"].push_back({{"code", static_cast<int>(each.code)}, {"text", each.meaning}});
  page["errors"] = Json::array();
  for (int code = 0; code <= static_cast<int>(kLastCode); ++code)
    page["errors"].push_back(
        {{"error", name(static_cast<Code>(code))}, {"exit_code", static_cast<int>(exit_for(static_cast<Code>(code)))}});
  return page;
}

std::optional<std::string> completion(const CLI::App& app, const std::string& shell) {
  std::vector<std::string> names;
  for (const CLI::App* verb : verb_apps(app)) names.push_back(verb->get_name());
  if (shell == "bash") {
    std::string cases;
    for (const CLI::App* verb : verb_apps(app))
      cases += fmt::format("    {}) flags=\"{}\" ;;\n", verb->get_name(), fmt::join(flags_of(*verb), " "));
    return fmt::format(
        "_torpor() {{\n  local word=\"${{COMP_WORDS[COMP_CWORD]}}\" flags=\"\"\n  if [ \"$COMP_CWORD\" -eq 1 ]; then\n "
        "   COMPREPLY=($(compgen -W \"{}\" -- \"$word\"))\n    return\n  fi\n"
        "  case \"${{COMP_WORDS[1]}}\" in\n{}  esac\n  case \"$word\" in\n    -*) COMPREPLY=($(compgen -W \"$flags\" "
        "-- \"$word\")) ;;\n    *) COMPREPLY=($(compgen -f -- \"$word\")) ;;\n  esac\n}}\n"
        "complete -o filenames -F _torpor torpor\n",
        fmt::join(names, " "), cases);
  }
  if (shell == "zsh") {
    std::string lines;
    std::string cases;
    const auto quoted = [](std::string text) {
      for (size_t at = text.find('\''); at != std::string::npos; at = text.find('\'', at + 4))
        text.replace(at, 1, "'\\''");
      for (size_t at = text.find(':'); at != std::string::npos; at = text.find(':', at + 2)) text.replace(at, 1, "\\:");
      return text;
    };
    for (const CLI::App* verb : verb_apps(app)) {
      lines += fmt::format("    '{}:{}'\n", verb->get_name(), quoted(verb->get_description()));
      cases += fmt::format("    {}) compadd -- {} ;;\n", verb->get_name(), fmt::join(flags_of(*verb), " "));
    }
    return fmt::format(
        "#compdef torpor\n_torpor() {{\n  local -a verbs=(\n{}  )\n  if (( CURRENT == 2 )); then\n    _describe verb "
        "verbs\n    return\n  fi\n  if [[ $PREFIX != -* ]]; then\n    _files\n    return\n  fi\n"
        "  case $words[2] in\n{}  esac\n}}\n_torpor \"$@\"\n",
        lines, cases);
  }
  if (shell == "fish") {
    std::string text;
    const auto quoted = [](std::string words) {
      for (size_t at = words.find('\''); at != std::string::npos; at = words.find('\'', at + 2))
        words.replace(at, 1, "\\'");
      return words;
    };
    for (const CLI::App* verb : verb_apps(app)) {
      text += fmt::format("complete -c torpor -n __fish_use_subcommand -a {} -d '{}'\n", verb->get_name(),
                          quoted(verb->get_description()));
      for (const CLI::Option* option : verb->get_options()) {
        for (const std::string& name : option->get_lnames())
          text += fmt::format("complete -c torpor -n '__fish_seen_subcommand_from {}' -l {} -d '{}'\n",
                              verb->get_name(), name, quoted(option->get_description()));
      }
    }
    return text;
  }
  return std::nullopt;
}

}  // namespace torpor::cli
