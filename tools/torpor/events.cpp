// SPDX-License-Identifier: Apache-2.0
// events, record, console: what engines tell while they run (console/), and what is left of those that were killed.
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>
#include <vector>

#include <fmt/core.h>

#include "console/engine_view.h"
#include "console/event_export.h"
#include "console/event_files.h"
#include "console/lints.h"
#include "console/recorder.h"
#include "tools/torpor/text.h"

namespace torpor::cli {
namespace {

using namespace std::chrono_literals;
using console::EngineView;
using console::EventExport;
using console::EventFollower;
using console::SourceEvents;

constexpr auto kPoll = 20ms;
constexpr auto kLook = 250ms;

std::string path_of(const Context& context) {
  return context.arguments.path.empty() ? console::default_event_directory() : context.arguments.path;
}

void declare_events_path(CLI::App& app, Arguments& a) {
  app.add_option("path", a.path,
                 "a directory of events of engines (their option events_dir), one of its rings, a recording, or a "
                 "directory of recordings; default: $XDG_RUNTIME_DIR/torpor, else /dev/shm/torpor-UID");
}

Result<Exit> events(const Context& context) {
  const Arguments& arguments = context.arguments;
  const bool whole = arguments.format == "perfetto" || arguments.format == "html";
  if (arguments.follow && whole)
    return Error{
        .code = Code::kInvalidArgument,
        .what = fmt::format("--export {} writes one file of all events, and --follow goes on", arguments.format),
        .next_step = "leave out --follow, or use --export ndjson or csv"};
  if (context.as_json && (whole || arguments.format == "csv"))
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("--json and --export {} are two formats", arguments.format),
                 .next_step = "leave out one of them"};
  TORPOR_ASSIGN_OR_RETURN(EventExport writer, EventExport::create({.types = arguments.types,
                                                                   .match = arguments.match,
                                                                   .since = arguments.since,
                                                                   .anonymous = arguments.anonymous}));
  const auto format = context.as_json || arguments.format == "ndjson" ? EventExport::Format::kNdjson
                      : arguments.format == "csv"                     ? EventExport::Format::kCsv
                                                                      : EventExport::Format::kLines;
  if (arguments.follow) {
    EventFollower follower(path_of(context), arguments.since == 0);
    while (!context.interrupted()) {
      TORPOR_ASSIGN_OR_RETURN(const std::vector<SourceEvents> news, follower.poll());
      if (!writer.write(news, format, context.write)) return kFine;
      std::this_thread::sleep_for(kPoll);
    }
    return kFine;
  }
  TORPOR_ASSIGN_OR_RETURN(const std::vector<SourceEvents> sources,
                          console::read_events(context.file_system, path_of(context)));
  const bool written = arguments.format == "perfetto" ? writer.write_perfetto(sources, context.write)
                       : arguments.format == "html"   ? writer.write_page(sources, context.write)
                                                      : writer.write(sources, format, context.write);
  if (!written) return kFailed;
  Exit exit = kFine;
  for (const SourceEvents& source : sources) {
    if (source.damaged == 0) continue;
    fmt::print(stderr, "torpor: {}: the last {} bytes are not whole\n", harmless(source.path), source.damaged);
    exit = kDamaged;
  }
  return exit;
}

Result<Exit> record(const Context& context) {
  const Arguments& arguments = context.arguments;
  TORPOR_ASSIGN_OR_RETURN(const auto recorder,
                          console::Recorder::create(context.file_system, path_of(context), arguments.output));
  const auto began = std::chrono::steady_clock::now();
  bool seen_alive = false;  // an engine that starts later is waited for
  bool said = false;
  for (bool last = false; !last;) {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - began;
    last = context.interrupted() || (arguments.for_seconds > 0 && passed.count() >= arguments.for_seconds);
    const Status looked = recorder->look(last);
    const bool nothing = recorder->counts().processes == 0;
    if (!looked && !(nothing && looked.error().code == Code::kNotFound)) return looked.error();
    if (nothing && !last && !said) {
      said = true;
      fmt::print(stderr, "torpor: waits for an engine that publishes events in {}\n", harmless(path_of(context)));
    }
    seen_alive = seen_alive || recorder->any_alive();
    const bool waits = !seen_alive && (arguments.for_seconds > 0 || nothing);
    if (!last && !waits && !recorder->any_alive()) {
      last = true;
      TORPOR_RETURN_IF_ERROR(recorder->look(true));
    }
    if (!last) std::this_thread::sleep_for(console::Recorder::kPoll);
  }
  const console::RecorderCounts counts = recorder->counts();
  if (counts.processes == 0) {
    return Error{.code = Code::kNotFound,
                 .what = fmt::format("no process has published events in {}", path_of(context)),
                 .next_step = "start an engine with this directory as its option events_dir, or name another one"};
  }
  const Json json = {{"directory", arguments.output},
                     {"processes", counts.processes},
                     {"events", counts.events},
                     {"lost", counts.lost}};
  context.write(context.as_json ? dump(json, 2) + "\n"
                                : fmt::format("{} events of {} processes in {}, {} lost\n", counts.events,
                                              counts.processes, harmless(arguments.output), counts.lost));
  return kFine;
}

// ---- console

struct Watched {
  EventSource source;
  bool alive = false;
  bool gone = false;
  uint64_t damaged = 0;
  EngineView view;
  console::Lints lints;
  int64_t began = 0;  // its first event that is there
};

void take(std::map<std::string, Watched>& watched, const std::vector<SourceEvents>& news) {
  for (const SourceEvents& each : news) {
    Watched& of = watched[each.path];
    of.source = each.source;
    of.alive = each.alive;
    of.gone = each.gone;
    of.damaged = each.damaged;
    for (const Event& event : each.events) {
      if (of.began == 0 && event.type != EventType::kLost) of.began = event.time;
      of.view.apply(event);
      of.lints.apply(event);
    }
  }
}

// Only what had been told so many seconds after the first event of all.
void cut_at(std::vector<SourceEvents>& sources, double seconds) {
  int64_t first = INT64_MAX;
  const auto wall = [](const SourceEvents& source, const Event& event) {
    return event.type == EventType::kLost ? INT64_MAX : source.source.wall(event.time);
  };
  for (const SourceEvents& source : sources) {
    for (const Event& event : source.events) first = std::min(first, wall(source, event));
  }
  if (first == INT64_MAX) return;
  const int64_t until = first + static_cast<int64_t>(std::clamp(seconds, 0.0, 1e9) * 1e9);
  for (SourceEvents& source : sources) {
    source.gone = false;  // at that time it may have been there
    const auto later = [&](const Event& event) {
      return event.type != EventType::kLost && wall(source, event) > until;
    };
    source.events.erase(std::find_if(source.events.begin(), source.events.end(), later), source.events.end());
  }
}

Json snapshot(const std::map<std::string, Watched>& watched) {
  Json processes = Json::array();
  for (const auto& [path, of] : watched) {
    Json json = {{"process", fmt::format("{}{}", of.source.role, of.source.rank)},
                 {"pid", of.source.pid},
                 {"alive", of.alive},
                 {"path", path},
                 {"began", of.began == 0 ? Json() : Json(of.source.wall_seconds(of.began))},
                 {"time", of.view.latest() == 0 ? Json() : Json(of.source.wall_seconds(of.view.latest()))}};
    json.update(of.view.to_json());
    Json lints = Json::array();
    for (const console::Finding& finding : of.lints.findings(of.view, of.gone))
      lints.push_back({{"lint", name(finding.lint)}, {"subject", finding.subject}, {"what", finding.what}});
    json["lints"] = std::move(lints);
    processes.push_back(std::move(json));
  }
  return {{"processes", std::move(processes)}};
}

// When each lint began, for who goes through a recording from one to the next.
void add_moments(Json& snapshot, const std::vector<SourceEvents>& sources) {
  for (Json& process : snapshot["processes"]) {
    Json moments = Json::array();
    for (const SourceEvents& source : sources) {
      if (source.path != process["path"]) continue;
      for (const console::LintMoment& moment : console::lint_moments(source))
        moments.push_back({{"time", source.source.wall_seconds(moment.time)},
                           {"lint", name(moment.finding.lint)},
                           {"subject", moment.finding.subject}});
    }
    process["lint_moments"] = std::move(moments);
  }
}

std::string seconds_text(const Json& seconds) { return fmt::format("{:.1f} s", seconds.get<double>()); }

std::string show_process(const Json& json) {
  std::string text =
      fmt::format("{}  pid {}  {}{}  {} running, {} waiting  step {} us  {} events lost\n", cell(json["process"]),
                  cell(json["pid"]), json["alive"].get<bool>() ? good("alive") : bad("gone"),
                  json["engine"].is_null() ? "" : "  " + cell(json["engine"]), cell(json["steps"]["running"]),
                  cell(json["steps"]["waiting"]), cell(json["steps"]["microseconds"]), cell(json["lost_events"]));
  const auto part = [&](const std::vector<Row>& rows) {
    if (rows.size() > 1) text += '\n' + table(rows);
  };
  std::vector<Row> rows = {{"LINT", "OF", ""}};
  for (const Json& lint : json["lints"])
    rows.push_back({bad(cell(lint["lint"])), cell(lint["subject"]), cell(lint["what"])});
  part(rows);
  rows = {{"STOP", "BY", "REQUEST", "STANDS"}};
  for (const Json& stop : json["stops"])
    rows.push_back({cell(stop["stop"]), cell(stop["cause"]), cell(stop["request"]), seconds_text(stop["seconds"])});
  part(rows);
  rows = {{"SLOT", "REQUEST", "STATE", "COMPUTED/ALL", "DEVICE", "STAGED", "HOST HITS", "DISK HITS", "IN STATE",
           "WAITING FOR"}};
  for (const Json& slot : json["slots"])
    rows.push_back({cell(slot["slot"]), cell(slot["request"]), cell(slot["state"]),
                    fmt::format("{}/{}", cell(slot["computed_tokens"]), cell(slot["tokens"])),
                    cell(slot["device_blocks"]), cell(slot["staged_blocks"]), cell(slot["host_hit_blocks"]),
                    cell(slot["disk_hit_blocks"]), seconds_text(slot["seconds_in_state"]), cell(slot["waiting_for"])});
  part(rows);
  rows = {{"WAY", "WAITING", "QUEUED", "PROMOTED", "OLDEST", "ENDED BLOCKS"}};
  for (const Json& way : json["transfers"]) {
    std::string ended;
    for (const auto& [name, count] : way["ended_blocks"].items())
      ended += (ended.empty() ? "" : ", ") + cell(count) + " " + name;
    rows.push_back({cell(way["way"]), cell(way["blocks"]["waiting"]), cell(way["blocks"]["queued"]),
                    cell(way["blocks"]["promoted"]), seconds_text(way["oldest_seconds"]), ended});
  }
  part(rows);
  rows = {{"LANE", "JOB", "UNDER WAY", "BATCHES", "FAILED", "BYTES"}};
  for (const Json& copy : json["copies"])
    rows.push_back({cell(copy["lane"]), cell(copy["job"]), cell(copy["under_way"]), cell(copy["batches"]),
                    cell(copy["failed"]), size_text(copy["bytes"])});
  part(rows);
  rows = {{"TIER", "USED", "PINNED", "CACHED", "EMPTY"}};
  for (const Json& tier : json["tiers"])
    rows.push_back({cell(tier["tier"]), cell(tier["used_blocks"]), cell(tier["pinned_blocks"]),
                    cell(tier["cached_blocks"]), cell(tier["empty_blocks"])});
  part(rows);
  rows = {{"MEMORY", "TAG", "DEVICE", "OF", "HOST", "DISK"}};
  for (const Json& rank : json["memory"]) {
    const std::string name = "rank " + cell(rank["rank"]);
    for (const Json& tag : rank["tags"])
      rows.push_back({name, cell(tag["tag"]), size_text(tag["device_bytes"]), size_text(tag["region_bytes"]),
                      size_text(tag["host_bytes"]), size_text(tag["disk_bytes"])});
    rows.push_back({name, "all", size_text(rank["device_bytes"]),
                    rank["device_capacity_bytes"] == 0 ? "" : size_text(rank["device_capacity_bytes"]),
                    size_text(rank["arena_bytes"]), ""});
  }
  part(rows);
  rows = {{"OPERATION", "STATE", "TIME", "PHASES", ""}};
  for (const Json& operation : json["operations"]) {
    std::string phases;
    for (const Json& phase : operation["phases"]) {
      phases += (phases.empty() ? "" : ", ") + cell(phase["phase"]);
      if (phase["state"] == "done") {
        phases += fmt::format(" {:.3f} s", phase["seconds"].get<double>());
      } else {
        phases += " " + cell(phase["state"]);
      }
    }
    rows.push_back({cell(operation["operation"]), cell(operation["state"]),
                    fmt::format("{:.3f} s", operation["seconds"].get<double>()), phases, cell(operation["error"])});
  }
  part(rows);
  return text;
}

// One line of a process that has ended, and what needs a look.
std::string show_ended(const Json& json) {
  std::string text =
      fmt::format("{}  pid {}  {}{}  {} requests; torpor console {} --once shows it\n", cell(json["process"]),
                  cell(json["pid"]), bad("gone"), json["engine"].is_null() ? "" : "  " + cell(json["engine"]),
                  json["slots"].size(), cell(json["path"]));
  for (const Json& lint : json["lints"])
    text += fmt::format("  {}  {}  {}\n", bad(cell(lint["lint"])), cell(lint["subject"]), cell(lint["what"]));
  return text;
}

// Processes that live come first, the one that publishes most before the others. Beside them, those that have ended
// have a line each.
std::string show_console(const Json& json) {
  std::vector<const Json*> alive;
  std::vector<const Json*> ended;
  for (const Json& process : json["processes"]) (process["alive"].get<bool>() ? alive : ended).push_back(&process);
  const auto steps = [](const Json* process) { return (*process)["steps"]["seen"].get<uint64_t>(); };
  std::stable_sort(alive.begin(), alive.end(), [&](const Json* a, const Json* b) { return steps(a) > steps(b); });
  std::string text;
  for (const Json* process : alive.empty() ? ended : alive)
    text += (text.empty() ? "" : "\n\n") + show_process(*process);
  for (size_t i = 0; i < ended.size() && !alive.empty(); ++i) text += (i == 0 ? "\n\n" : "") + show_ended(*ended[i]);
  return text;
}

// As much of the text as the terminal has lines and columns.
std::string on_terminal(const std::string& text) {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row == 0) return text;
  return fitted(text, size.ws_row, size.ws_col);
}

// A line for each look, for a program that shows them.
Result<Exit> follow_live(const Context& context) {
  std::map<std::string, Watched> watched;
  EventFollower follower(path_of(context), false);
  while (!context.interrupted()) {
    TORPOR_ASSIGN_OR_RETURN(const std::vector<SourceEvents> news, follower.poll());
    take(watched, news);
    if (!context.write(dump(snapshot(watched)) + '\n')) break;
    std::this_thread::sleep_for(kLook);
  }
  return kFine;
}

Result<Exit> show_live(const Context& context) {
  std::map<std::string, Watched> watched;
  if (context.as_json && context.arguments.follow) return follow_live(context);
  if (context.arguments.once || context.arguments.lint || context.arguments.at >= 0 || context.as_json ||
      ::isatty(STDOUT_FILENO) == 0) {
    TORPOR_ASSIGN_OR_RETURN(std::vector<SourceEvents> sources,
                            console::read_events(context.file_system, path_of(context)));
    if (context.arguments.at >= 0) cut_at(sources, context.arguments.at);
    take(watched, sources);
    Json json = snapshot(watched);
    if (context.arguments.lint && context.as_json) add_moments(json, sources);
    context.write(context.as_json ? dump(json, 2) + "\n" : show_console(json));
    const bool found = std::any_of(json["processes"].begin(), json["processes"].end(),
                                   [](const Json& process) { return !process["lints"].empty(); });
    return context.arguments.lint && found ? kDiffers : kFine;
  }
  EventFollower follower(path_of(context), false);
  for (int round = 0; !context.interrupted(); ++round) {
    TORPOR_ASSIGN_OR_RETURN(const std::vector<SourceEvents> news, follower.poll());
    take(watched, news);
    if (round % 25 == 0 && !context.write("\x1b[H" + on_terminal(show_console(snapshot(watched))) + "\x1b[J")) break;
    std::this_thread::sleep_for(kPoll);
  }
  return kFine;
}

}  // namespace

Verb events_verb() {
  return {.name = "events",
          .help = "what engines tell, and what killed ones said last; live, or out of a recording",
          .json = "an object a line: time, process, pid, sequence, type, and the fields of the type",
          .declare =
              [](CLI::App& app, Arguments& a) {
                declare_events_path(app, a);
                app.add_flag("-f,--follow", a.follow, "go on with what is told from now on");
                app.add_option("--since", a.since, "seconds, or 10m: only what is not older than that")
                    ->transform(CLI::AsNumberWithUnit(std::map<std::string, double>{{"s", 1}, {"m", 60}, {"h", 3600}},
                                                      CLI::AsNumberWithUnit::CASE_SENSITIVE, "TIME"));
                app.add_option("--type", a.types, "only these, with commas between them: slot,phase");
                app.add_option("--match", a.match, "only where a request's name or a state has this in it");
                app.add_option("--export", a.format, "ndjson, csv, html (a page), or perfetto for ui.perfetto.dev")
                    ->check(CLI::IsMember({"ndjson", "csv", "html", "perfetto"}));
                app.add_flag("--anonymize", a.anonymous,
                             "other names for requests, other keys, no words of errors and inputs");
              },
          .stream = events};
}

Verb record_verb() {
  return {
      .name = "record",
      .help = "writes all that engines tell into files, until they end, or it is interrupted; waits for the first one",
      .json = "directory, processes, events, lost",
      .declare =
          [](CLI::App& app, Arguments& a) {
            declare_events_path(app, a);
            app.add_option("-o,--output", a.output, "a directory, made if it is not there; a file a process")
                ->required();
            app.add_option("--for", a.for_seconds, "seconds, or 10m: and no longer")
                ->transform(CLI::AsNumberWithUnit(std::map<std::string, double>{{"s", 1}, {"m", 60}, {"h", 3600}},
                                                  CLI::AsNumberWithUnit::CASE_SENSITIVE, "TIME"));
          },
      .stream = record};
}

Verb console_verb() {
  return {
      .name = "console",
      .help = "what engines do now: requests by state, transfers, copies, tiers, sleeps and wakes by phase",
      .json =
          "processes: [{process, pid, alive, path, began, time, engine, steps, slots, transfers, copies, tiers, "
          "memory, blocks, "
          "operations, stops, lints, lost_events, unknown_events; with --lint lint_moments: [{time, lint, subject}]}]",
      .declare =
          [](CLI::App& app, Arguments& a) {
            declare_events_path(app, a);
            app.add_flag("--once", a.once, "print it once; so it is with --json and without a terminal");
            app.add_flag("-f,--follow", a.follow, "with --json: a line four times a second");
            app.add_option("--at", a.at, "once, as it was so many seconds after the first event");
            app.add_flag("--lint", a.lint,
                         "the same; exit code 6 if there is anything that one should look at; with --json "
                         "also when each began");
          },
      .stream = show_live};
}

}  // namespace torpor::cli
