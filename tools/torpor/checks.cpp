// SPDX-License-Identifier: Apache-2.0
// verify, diff: whether a checkpoint is whole, how two differ.
#include <algorithm>
#include <fstream>
#include <map>

#include <unistd.h>

#include <fmt/core.h>
#include <fmt/ranges.h>
#include <boost/filesystem.hpp>

#include "checkpoint/image_section.h"
#include "checkpoint/verify.h"
#include "console/event_files.h"
#include "console/recording.h"
#include "console/recording_diff.h"
#include "tools/torpor/images.h"
#include "tools/torpor/text.h"

namespace torpor::cli {
namespace {

Result<Json> verify(const Context& context) {
  Json problems = Json::array();
  std::string path = context.arguments.path;
  Verification found;
  Result<Checkpoint> checkpoint = open_checkpoint(context.file_system, path, context.key);
  if (checkpoint) {
    path = checkpoint->path();
    TORPOR_ASSIGN_OR_RETURN(found, torpor::verify(*checkpoint, {.threads = context.arguments.threads,
                                                                .contents = !context.arguments.quick,
                                                                .progress = context.progress}));
    for (const Error& error : found.problems) problems.push_back(to_json(error));
  } else if (checkpoint.error().code == Code::kCorruption) {
    problems.push_back(to_json(checkpoint.error()));
  } else {
    return checkpoint.error();
  }
  const bool whole = problems.empty();
  return Json{{"path", path},
              {"whole", whole},
              {"image", checkpoint && is_image(checkpoint->manifest())},
              {"problems", std::move(problems)},
              {"checked",
               {{"bytes", found.bytes},
                {"sections", found.sections},
                {"chunks", found.chunks},
                {"table_entries", found.table_entries},
                {"references", found.references},
                {"hashes", found.hashes}}},
              {"hashes_not_checked", found.hashes_not_checked.empty() ? Json() : Json(found.hashes_not_checked)}};
}

std::string show_verify(const Json& json) {
  const Json& checked = json["checked"];
  std::string text =
      fmt::format("{} sections, {} chunks, {}; {} table entries, {} references, {} prefix hashes recomputed\n",
                  cell(checked["sections"]), cell(checked["chunks"]), size_text(checked["bytes"]),
                  cell(checked["table_entries"]), cell(checked["references"]), cell(checked["hashes"]));
  if (!json["hashes_not_checked"].is_null())
    text += fmt::format("prefix hashes not recomputed: {}\n", cell(json["hashes_not_checked"]));
  if (json["whole"]) return text + fmt::format("{}: {}\n", cell(json["path"]), good("whole"));
  text += fmt::format("{}: {}\n", cell(json["path"]), bad(fmt::format("{} problems", json["problems"].size())));
  for (const Json& problem : json["problems"])
    text += fmt::format("  {}: {}\n", cell(problem["code"]), cell(problem["what"]));
  return text + (json["image"] ? "next: remove the image's directory, and send its requests again\n"
                               : "next: torpor repair keeps the requests that are whole\n");
}

// ---- diff

struct Read {
  Checkpoint checkpoint;
  EngineCheckpoint engine;
};

Result<Read> read(const Context& context, const std::string& path) {
  TORPOR_ASSIGN_OR_RETURN(Checkpoint checkpoint, open_checkpoint(context.file_system, path, context.key));
  TORPOR_ASSIGN_OR_RETURN(EngineCheckpoint engine, checkpoint.read_state());
  return Read{std::move(checkpoint), std::move(engine)};
}

// {"added", "removed", "changed", "same"} of two maps from name to anything comparable.
template <class Map>
Json compare(const Map& a, const Map& b) {
  Json added = Json::array();
  Json removed = Json::array();
  Json changed = Json::array();
  uint64_t same = 0;
  for (const auto& [name, value] : a) {
    const auto other = b.find(name);
    if (other == b.end()) {
      removed.push_back(name);
    } else if (other->second == value) {
      ++same;
    } else {
      changed.push_back(name);
    }
  }
  for (const auto& [name, value] : b) {
    if (!a.contains(name)) added.push_back(name);
  }
  return {
      {"added", std::move(added)}, {"removed", std::move(removed)}, {"changed", std::move(changed)}, {"same", same}};
}

std::map<std::string, RequestState> requests_of(const Read& read) {
  std::map<std::string, RequestState> map;
  for (const RequestState& request : read.engine.state.scheduler.requests) map.emplace(request.id, request);
  return map;
}

Result<std::map<std::string, std::string>> chunks_of(const Read& read) {
  std::map<std::string, std::string> map;
  for (const RankSummary& rank : read.checkpoint.manifest().ranks) {
    TORPOR_ASSIGN_OR_RETURN(const RankRefs refs, read.checkpoint.refs(rank));
    for (const SavedChunk& chunk : refs.records)
      map.emplace(fmt::format("rank {}: {}", rank.rank, chunk.key.to_string()), chunk.digest.hex());
  }
  return map;
}

// Of recordings: each of one process.
Result<Json> diff_of_recordings(const Context& context) {
  std::vector<console::SourceEvents> both;
  for (const std::string& path : {context.arguments.path, context.arguments.second}) {
    TORPOR_ASSIGN_OR_RETURN(std::vector<console::SourceEvents> found, console::read_events(context.file_system, path));
    if (found.size() != 1) {
      return Error{.code = Code::kInvalidArgument,
                   .what = fmt::format("{} has recordings of {} processes", path, found.size()),
                   .next_step = "name one of its files"};
    }
    both.push_back(std::move(found[0]));
  }
  Json json = {{"a", both[0].path}, {"b", both[1].path}};
  json.update(console::diff_recordings(both[0], both[1]));
  return json;
}

std::string show_diff_of_recordings(const Json& json) {
  std::string text = fmt::format("--- {}\n+++ {}\n", cell(json["a"]), cell(json["b"]));
  std::vector<Row> rows = {{"WHAT", "A", "B"}};
  for (const Json& each : json["differences"])
    rows.push_back({cell(each["what"]), fmt::format("{:.0f}", each["a"].get<double>()),
                    fmt::format("{:.0f}", each["b"].get<double>())});
  if (rows.size() > 1) text += table(rows) + '\n';
  rows = {{"WHAT", "COUNT", "", "MEDIAN", "", "P99", ""}};
  for (const Json& each : json["times"]) {
    Row row = {cell(each["what"]), cell(each["count"][0]), cell(each["count"][1])};
    for (const char* part : {"median", "p99"}) {
      for (const Json& seconds : each[part]) row.push_back(fmt::format("{:.6f} s", seconds.get<double>()));
    }
    rows.push_back(std::move(row));
  }
  if (rows.size() > 1) text += table(rows) + '\n';
  const Json& first = json["first_difference"];
  text += fmt::format("the first event that differs is number {}; the last ones until it:\n", cell(first["event"]));
  for (const auto& [side, sign] : {std::pair("a", '-'), std::pair("b", '+')}) {
    for (const Json& event : first[side]) text += fmt::format("{} {}\n", sign, cell(event));
  }
  return text;
}

bool is_recording(const std::string& path) {
  boost::system::error_code problem;
  if (path.ends_with(console::kRecordingEnding)) return true;
  for (boost::filesystem::directory_iterator at(path, problem), end; !problem && at != end; at.increment(problem)) {
    if (at->path().extension() == console::kRecordingEnding.data()) return true;
  }
  return false;
}

Result<Json> diff(const Context& context) {
  if (is_recording(context.arguments.path) && is_recording(context.arguments.second))
    return diff_of_recordings(context);
  TORPOR_ASSIGN_OR_RETURN(const Read a, read(context, context.arguments.path));
  TORPOR_ASSIGN_OR_RETURN(const Read b, read(context, context.arguments.second));
  if (is_image(a.checkpoint.manifest()) || is_image(b.checkpoint.manifest()))
    return diff_of_images(a.checkpoint, b.checkpoint);
  Json json = {{"a", a.checkpoint.path()}, {"b", b.checkpoint.path()}};
  json["fingerprint"] = compare(a.engine.fingerprint, b.engine.fingerprint);
  json["requests"] = compare(requests_of(a), requests_of(b));
  TORPOR_ASSIGN_OR_RETURN(const auto before_chunks, chunks_of(a));
  TORPOR_ASSIGN_OR_RETURN(const auto chunks, chunks_of(b));
  json["chunks"] = compare(before_chunks, chunks);
  const CapturedState& before = a.engine.state;
  const CapturedState& now = b.engine.state;
  json["same_queues"] = before.scheduler.running == now.scheduler.running &&
                        before.scheduler.waiting == now.scheduler.waiting &&
                        before.scheduler.held == now.scheduler.held;
  json["same_kv"] = before.kv == now.kv;
  json["kv_blocks"] = {before.kv.num_blocks, now.kv.num_blocks};
  json["same_samplers"] = before.workers == now.workers;
  bool equal = json["same_queues"] && json["same_kv"] && json["same_samplers"];
  for (const char* part : {"fingerprint", "requests", "chunks"})
    equal = equal && json[part]["added"].empty() && json[part]["removed"].empty() && json[part]["changed"].empty();
  json["equal"] = equal;
  return json;
}

std::string show_diff(const Json& json) {
  if (json["equal"]) return "equal\n";
  if (json.contains("first_difference")) return show_diff_of_recordings(json);
  if (json.contains("pairs")) return show_diff_of_images(json);
  std::string text = fmt::format("--- {}\n+++ {}\n", cell(json["a"]), cell(json["b"]));
  for (const char* part : {"fingerprint", "requests", "chunks"}) {
    text += fmt::format("{}: {} same\n", part, cell(json[part]["same"]));
    for (const auto& [kind, sign] : {std::pair("removed", '-'), std::pair("added", '+'), std::pair("changed", '~')}) {
      const Json& names = json[part][kind];
      constexpr size_t kMost = 20;
      for (size_t i = 0; i < std::min(names.size(), kMost); ++i) text += fmt::format("  {} {}\n", sign, cell(names[i]));
      if (names.size() > kMost)
        text += fmt::format("  {} … and {} more (--json has all)\n", sign, names.size() - kMost);
    }
  }
  if (const Json& blocks = json["kv_blocks"]; blocks[0] != blocks[1])
    text += fmt::format("KV blocks: {} and {}; a wake takes any number that has room for the requests\n",
                        cell(blocks[0]), cell(blocks[1]));
  for (const auto& [key, what] : {std::pair("same_queues", "queues"), std::pair("same_kv", "KV bookkeeping"),
                                  std::pair("same_samplers", "samplers")}) {
    text += fmt::format("{}: {}\n", what, json[key] ? "same" : "changed");
  }
  return text;
}

}  // namespace

Verb verify_verb() {
  return {.name = "verify",
          .help = "reads every byte; checks digests, seals, cross-references, reference counts and prefix hashes",
          .json =
              "path, whole, image, problems: [{code, what, next_step}], checked: {bytes, sections, chunks, "
              "table_entries, references, hashes}, hashes_not_checked",
          .declare =
              [](CLI::App& app, Arguments& a) {
                declare_path(app, a);
                app.add_flag("--quick", a.quick, "the state and the cross-references, not the saved memory");
                app.add_option("--threads", a.threads, "that read and hash")->check(CLI::Range(0, 256));
              },
          .ask = verify,
          .show = show_verify,
          .exit = [](const Json& json) { return json["whole"] ? kFine : kDamaged; }};
}
Verb diff_verb() {
  return {
      .name = "diff",
      .help = "what differs between two checkpoints, two images of hibernated requests, or two recordings of a process",
      .json =
          "a, b, equal, fingerprint, requests, chunks: {added, removed, changed, same}, same_queues, same_kv, "
          "kv_blocks: [a, b], same_samplers; of images a, b, kinds, equal, fingerprint: [fields that differ], "
          "same_queues, same_samplers, problems, removed, added, pairs: [{a, b, by, common_tokens, tokens, seeds, "
          "fields, equal_blocks, blocks}]; of "
          "recordings a, b, equal, events, differences: [{what, a, b}], times: [{what, count, median, p99}], "
          "first_difference: {event, a, b}",
      .declare =
          [](CLI::App& app, Arguments& a) {
            declare_path(app, a);
            app.add_option("other", a.second, "the other one")->required();
          },
      .ask = diff,
      .show = show_diff,
      .exit = [](const Json& json) { return json["equal"] ? kFine : kDiffers; }};
}
}  // namespace torpor::cli
