// torpor: looks into checkpoints, without an engine, a GPU or Python. Verbs and exit codes: tools/torpor/README.md.
#include <cstdio>
#include <functional>
#include <iostream>
#include <string>

#include <CLI/CLI.hpp>

#include "tools/torpor/inspect.h"
#include "tools/torpor/render.h"

namespace {

using torpor::inspect::Json;

// Exit codes, beside CLI11's own for a command line that it cannot read, which become kUsage.
enum Exit { kFine = 0, kDamaged = 1, kUsage = 2, kNotFound = 3, kOtherFormat = 4, kFailed = 5 };

Exit exit_for(torpor::Code code) {
  switch (code) {
    case torpor::Code::kCorruption: return kDamaged;
    case torpor::Code::kInvalidArgument: return kUsage;
    case torpor::Code::kNotFound: return kNotFound;
    case torpor::Code::kIncompatible: return kOtherFormat;
    default: return kFailed;
  }
}

struct Verb {
  const char* name;
  const char* help;
  std::function<torpor::Result<Json>(torpor::FileSystem&, const std::string&)> ask;
  std::function<std::string(const Json&)> show;
};

int run(const Verb& verb, const std::string& path, bool as_json) {
  const torpor::Result<Json> answer = verb.ask(torpor::linux_file_system(), path);
  // Names in a checkpoint may be any bytes; invalid UTF-8 is replaced, so that the JSON is always JSON.
  const auto dump = [](const Json& json) { return json.dump(2, ' ', false, Json::error_handler_t::replace) + '\n'; };
  if (!answer) {
    const torpor::Error& error = answer.error();
    if (as_json) std::cout << dump({{"error", torpor::inspect::to_json(error)}});
    std::cerr << "torpor: " << torpor::render::harmless(error.to_string()) << '\n';
    return exit_for(error.code);
  }
  std::cout << (as_json ? dump(*answer) : verb.show(*answer)) << std::flush;
  if (!std::cout) return kFailed;
  return answer->value("whole", true) ? kFine : kDamaged;
}

}  // namespace

int main(int argc, char** argv) {
  const Verb verbs[] = {
      {"ls", "the checkpoints of a directory, oldest first", torpor::inspect::list, torpor::render::list},
      {"info", "what a checkpoint holds and what it needs to be woken", torpor::inspect::info, torpor::render::info},
      {"requests", "its requests: queue, progress, blocks, sampling", torpor::inspect::requests, torpor::render::requests},
      {"verify", "reads every byte and checks every digest and cross-reference", torpor::inspect::verify, torpor::render::verify},
  };
  CLI::App app{"Looks into torpor's checkpoints. PATH is a checkpoint, or a directory of checkpoints, of which the latest one is taken."};
  app.set_version_flag("--version", TORPOR_VERSION);
  app.require_subcommand(1);
  app.footer("Exit codes: 0 fine, 1 damaged, 2 wrong usage, 3 not found, 4 another format, 5 could not be read.");
  std::string path;
  bool as_json = false;
  for (const Verb& verb : verbs) {
    CLI::App* command = app.add_subcommand(verb.name, verb.help);
    command->add_option("path", path, "a checkpoint or a directory of checkpoints")->required();
    command->add_flag("--json", as_json, "print one JSON object");
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& problem) {
    return app.exit(problem) == 0 ? kFine : kUsage;
  }
  for (const Verb& verb : verbs) {
    if (app.got_subcommand(verb.name)) return run(verb, path, as_json);
  }
  return kUsage;
}
