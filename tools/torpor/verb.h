// SPDX-License-Identifier: Apache-2.0
// Verb: one word of `torpor`: what it is asked with, its answer as JSON, and that JSON as text. Tables and --json come
// from one answer, so they cannot differ; help, man page, completion and the list in README.md come from verbs().
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/file_system.h"
#include "base/progress.h"
#include "base/seal.h"
#include "base/status.h"

namespace torpor::cli {

using Json = nlohmann::ordered_json;  // keys in the order in which they are read

// Exit codes, each with its meaning in exit_codes().
enum Exit : int {  // of `pair`, too, which ends with any code of a server
  kFine = 0,
  kDamaged = 1,
  kUsage = 2,
  kNotFound = 3,
  kOtherFormat = 4,
  kFailed = 5,
  kDiffers = 6,
  kKey = 7,
  kRefused = 8,
  kUnknown = 9
};
struct ExitCode {
  Exit code;
  const char* meaning;
};
const std::vector<ExitCode>& exit_codes();
Exit exit_for(Code code);

inline constexpr int kKeepAll = 1 << 30;  // gc

// All that a command line can say. A verb reads what it declared.
struct Arguments {
  std::string path;
  std::string second;  // pair: --own-ports; diff: the other checkpoint; show, cat, extract: what; repair, push: where
                       // to; --like; switch: --to
  std::string output;  // extract: file; pull: directory; pair: --python
  std::string tokenizer;            // file tokenizer.json
  std::string model;                // fits: a model's directory
  std::vector<std::string> fields;  // fits: NAME=VALUE
  uint64_t memory_bytes = 0;        // fits
  int keep = 0;
  double max_age_seconds = -1;
  uint64_t max_total_bytes = 0;
  int threads = 0;
  bool quick = false;
  bool dry_run = false;
  bool force = false;             // gc, rm of a URL
  std::string format;             // events
  std::string types;              // events
  std::string match;              // events
  double since = 0;               // events: seconds
  double for_seconds = 0;         // record
  bool follow = false;            // events, console
  bool anonymous = false;         // events
  bool blocks = false;            // mock
  bool once = false;              // console
  bool lint = false;              // console
  double at = -1;                 // console: seconds
  int64_t device_blocks = -1;     // replay; -1: as recorded
  int64_t host_blocks = -1;       // replay
  int64_t disk_blocks = -1;       // replay
  std::vector<std::string> call;  // live: method and parameters; pair: a server's
};

struct Context {
  FileSystem& file_system;
  std::shared_ptr<const Key> key;
  ProgressSink progress;
  const Arguments& arguments;
  bool as_json = false;
  std::function<bool(std::string_view)> write{};  // to standard output; false: nobody reads any more
  std::function<bool()> interrupted{};
};

struct Verb {
  const char* name;
  const char* help;
  const char* json;  // the keys of its --json, for people
  std::function<void(CLI::App&, Arguments&)> declare;
  std::function<Result<Json>(const Context&)> ask;
  std::function<std::string(const Json&)> show;
  std::function<Exit(const Json&)> exit = [](const Json&) { return kFine; };
  bool raw = false;  // the answer's "content" is bytes for standard output, not text
  // In place of `ask`: writes as it goes.
  std::function<Result<Exit>(const Context&)> stream{};
};

const std::vector<Verb>& verbs();

// The verbs, by what they are about: catalogue.cpp, requests.cpp, blocks.cpp, checks.cpp, contents.cpp, fits.cpp,
// changes.cpp, remote.cpp, events.cpp, live.cpp, replay.cpp, mock.cpp, sessions.cpp, pair.cpp, switch.cpp; images.cpp
// helps tree and diff.
Verb ls_verb();
Verb info_verb();
Verb tree_verb();
Verb du_verb();
Verb requests_verb();
Verb show_verb();
Verb blocks_verb();
Verb prefix_verb();
Verb verify_verb();
Verb diff_verb();
Verb fits_verb();
Verb cat_verb();
Verb extract_verb();
Verb repair_verb();
Verb gc_verb();
Verb rm_verb();
Verb events_verb();
Verb record_verb();
Verb console_verb();
Verb live_verb();
Verb replay_verb();
Verb mock_verb();
Verb sessions_verb();
Verb pair_verb();
Verb switch_verb();
Verb push_verb();
Verb pull_verb();

Json to_json(const Error& error);
void declare_path(CLI::App& app, Arguments& arguments);  // a checkpoint, or a directory of which the latest is taken

}  // namespace torpor::cli
