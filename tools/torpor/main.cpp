// SPDX-License-Identifier: Apache-2.0
// torpor: looks into checkpoints, without an engine, a GPU or Python. Verbs and exit codes: tools/torpor/README.md.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <string>

#include <sys/ioctl.h>
#include <unistd.h>

#include <fmt/core.h>
#include <CLI/CLI.hpp>

#include "tools/torpor/manual.h"
#include "tools/torpor/progress_text.h"
#include "tools/torpor/text.h"
#include "tools/torpor/verb.h"

namespace {

using torpor::cli::Json;

volatile std::sig_atomic_t interrupted = 0;

std::string dump(const Json& json) { return torpor::cli::dump(json, 2) + '\n'; }

// One line on a terminal's standard error, now and then; stops on an interrupt.
torpor::ProgressSink progress_line() {
  std::signal(SIGINT, [](int) { interrupted = 1; });
  if (::isatty(STDERR_FILENO) == 0) return [](const torpor::Progress&) { return interrupted == 0; };
  return [last = 0.0](const torpor::Progress& progress) mutable {
    if (progress.seconds < last) last = 0;  // another phase has begun
    if (progress.seconds - last >= 0.2) {
      last = progress.seconds;
      winsize size{};
      const bool known = ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1;
      fmt::print(stderr, "\r\x1b[K{}", torpor::cli::progress_text(progress, known ? size.ws_col - 1U : 79U));
    }
    if (progress.bytes_done >= progress.bytes_total && last > 0) fmt::print(stderr, "\r\x1b[K");
    return interrupted == 0;
  };
}

bool write_out(std::string_view text) {
  return std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0;
}

int fail(const torpor::Error& error, bool as_json) {
  if (as_json) write_out(dump({{"error", torpor::cli::to_json(error)}}));
  std::cerr << "torpor: " << torpor::harmless(error.to_string()) << '\n';
  return interrupted != 0 ? 130 : torpor::cli::exit_for(error.code);
}

int run(const torpor::cli::Verb& verb, const torpor::cli::Arguments& arguments, const std::string& key_file,
        bool as_json) {
  torpor::cli::Context context{torpor::linux_file_system(),    nullptr, progress_line(), arguments, as_json, write_out,
                               [] { return interrupted != 0; }};
  if (!key_file.empty()) {
    torpor::Result<torpor::Key> key = torpor::Key::read_file(key_file);
    if (!key) return fail(key.error(), as_json);
    context.key = std::make_shared<const torpor::Key>(*key);
  }
  if (verb.stream) {
    const torpor::Result<torpor::cli::Exit> ended = torpor::try_catch([&] { return verb.stream(context); });
    return ended ? *ended : fail(ended.error(), as_json);
  }
  const torpor::Result<Json> answer = torpor::try_catch([&] { return verb.ask(context); });
  if (!answer) return fail(answer.error(), as_json);
  bool written = false;
  if (verb.raw && !as_json) {
    const auto& bytes = (*answer)["content"].get_binary();
    written = write_out({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  } else {
    written = write_out(as_json ? dump(*answer) : verb.show(*answer));
  }
  return written ? verb.exit(*answer) : torpor::cli::kFailed;
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_DFL);  // `torpor … | head` ends quietly
  torpor::cli::use_colours(::isatty(STDOUT_FILENO) != 0 && std::getenv("NO_COLOR") == nullptr);
  CLI::App app{
      "Looks into torpor's checkpoints: what is in them, whether they are whole, whether they may be woken here. PATH "
      "is a checkpoint, or a directory of checkpoints, of which the latest is taken. "
      "Only repair, gc, rm, record, push and pull write. events, record and console look at engines that run, and at "
      "what killed "
      "ones said last."};
  app.name("torpor");
  app.set_version_flag("--version", TORPOR_VERSION);
  app.require_subcommand(1);
  std::string codes = "Exit codes:";
  for (const auto& [code, meaning] : torpor::cli::exit_codes())
    codes += fmt::format("\n  {} {}", static_cast<int>(code), meaning);
  app.footer(codes);
  // Each verb has its own: CLI11 sets options from environment variables also in verbs that were not called.
  struct Given {
    torpor::cli::Arguments arguments;
    std::string key_file;
  };
  std::map<std::string, Given> given;
  std::string shell;
  bool as_json = false;
  for (const torpor::cli::Verb& verb : torpor::cli::verbs()) {
    CLI::App* command = app.add_subcommand(verb.name, verb.help);
    auto& [arguments, key_file] = given[verb.name];
    verb.declare(*command, arguments);
    command->add_flag("--json", as_json, "print one JSON object");
    command->add_option("--key-file", key_file, "of sealed checkpoints: only what was sealed with it is read")
        ->envname("TORPOR_KEY_FILE")
        ->type_name("FILE");
  }
  CLI::App* const man = app.add_subcommand("man", "this tool's man page; read it with: torpor man | man -l -");
  man->add_flag("--json", as_json, "print its verbs, arguments and exit codes as one JSON object");
  CLI::App* const completion = app.add_subcommand("completion", "a shell's completion script: bash, zsh or fish");
  completion->add_option("shell", shell, "bash, zsh or fish")->required();
  const auto is_named = [&](const CLI::App* command) { return command->get_name() == argv[1]; };
  if (argc > 1 && argv[1][0] != '-' && app.get_subcommands(is_named).empty()) {
    return fail({.code = torpor::Code::kInvalidArgument,
                 .what = fmt::format("there is no command \"{}\"", argv[1]),
                 .next_step = "torpor --help names them"},
                false);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& problem) {
    return app.exit(problem) == 0 ? torpor::cli::kFine : torpor::cli::kUsage;
  }
  if (man->parsed()) {
    const std::string page = as_json ? dump(torpor::cli::reference(app)) : torpor::cli::man_page(app);
    return write_out(page) ? torpor::cli::kFine : torpor::cli::kFailed;
  }
  if (completion->parsed()) {
    const std::optional<std::string> script = torpor::cli::completion(app, shell);
    if (!script)
      return fail({.code = torpor::Code::kInvalidArgument,
                   .what = fmt::format("there is no completion for {}", shell),
                   .next_step = "use bash, zsh or fish"},
                  false);
    return write_out(*script) ? torpor::cli::kFine : torpor::cli::kFailed;
  }
  for (const torpor::cli::Verb& verb : torpor::cli::verbs()) {
    if (app.got_subcommand(verb.name)) return run(verb, given[verb.name].arguments, given[verb.name].key_file, as_json);
  }
  return torpor::cli::kUsage;
}
