// SPDX-License-Identifier: Apache-2.0
// replay: a recording of a reference engine, given to another one.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include <fmt/core.h>
#include <boost/filesystem.hpp>

#include "console/event_export.h"
#include "console/event_files.h"
#include "console/model_replay.h"
#include "console/replay.h"
#include "tools/torpor/text.h"
#include "tools/torpor/verb.h"

namespace torpor::cli {
namespace {

using console::SourceEvents;

constexpr size_t kShownBefore = 10;

// For checkpoints and the disk tier of a replay.
class Scratch {
 public:
  static Result<Scratch> make() {
    std::string path = (boost::filesystem::temp_directory_path() / "torpor-replay-XXXXXX").string();
    if (::mkdtemp(path.data()) == nullptr) return system_error(errno, "making a directory for the replay");
    return Scratch(std::move(path));
  }
  Scratch(Scratch&& other) noexcept : path_(std::move(other.path_)) { other.path_.clear(); }
  Scratch& operator=(Scratch&&) = delete;
  ~Scratch() {
    boost::system::error_code ignored;
    if (!path_.empty()) boost::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  explicit Scratch(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

Json shown(const SourceEvents& recording, const console::ReplayDifference& difference) {
  Result<console::EventExport> writer = console::EventExport::create({});
  Json before = Json::array();
  console::EventTexts texts;
  for (size_t i = 0; i < std::min(difference.at, recording.events.size()); ++i) {
    (void)texts.add(recording.events[i]);
    if (i + kShownBefore >= difference.at)
      before.push_back(writer->to_json(recording.source, texts, recording.events[i]));
  }
  const auto one = [&](const std::optional<Event>& event) {
    return event ? writer->to_json(recording.source, texts, *event) : Json();
  };
  return {{"event", difference.at},
          {"before", std::move(before)},
          {"recorded", one(difference.recorded)},
          {"replayed", one(difference.replayed)}};
}

Json to_json(const console::TierSizes& tiers) {
  return {{"device", tiers.device}, {"host", tiers.host}, {"disk", tiers.disk}};
}

// The same requests in tiers as they were, and in those that are asked for.
Result<Json> what_if(const Context& context, const SourceEvents& recording) {
  const Arguments& arguments = context.arguments;
  const console::TierSizes as_recorded = console::recorded_sizes(recording);
  const auto of = [](int64_t asked, int64_t recorded) { return asked < 0 ? recorded : asked; };
  const console::TierSizes asked = {.device = of(arguments.device_blocks, as_recorded.device),
                                    .host = of(arguments.host_blocks, as_recorded.host),
                                    .disk = of(arguments.disk_blocks, as_recorded.disk)};
  Json models = Json::array();
  uint64_t requests = 0;
  uint64_t blocks = 0;
  for (const console::TierSizes& sizes : {as_recorded, asked}) {
    TORPOR_ASSIGN_OR_RETURN(const console::ModelResult result, console::replay_in_model(recording, sizes));
    requests = result.requests;
    blocks = result.asked;
    models.push_back({{"blocks", to_json(result.sizes)}, {"found", to_json(result.found)}});
  }
  const console::RecordedHits hits = console::recorded_hits(recording);
  return Json{{"recording", recording.path},
              {"requests", requests},
              {"prompt_blocks", blocks},
              {"recorded", {{"asked", hits.asked}, {"host", hits.host}, {"disk", hits.disk}}},
              {"models", std::move(models)}};
}

Result<Json> replay(const Context& context) {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<SourceEvents> found,
                          console::read_events(context.file_system, context.arguments.path));
  if (found.size() != 1) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("{} has recordings of {} processes", context.arguments.path, found.size()),
                 .next_step = "name one of its files"};
  }
  const Arguments& arguments = context.arguments;
  const bool asks = std::max({arguments.device_blocks, arguments.host_blocks, arguments.disk_blocks}) >= 0;
  if (asks) return what_if(context, found[0]);
  TORPOR_ASSIGN_OR_RETURN(const Scratch scratch, Scratch::make());
  TORPOR_ASSIGN_OR_RETURN(const console::ReplayResult result,
                          console::replay(found[0], {.files = context.file_system, .directory = scratch.path()}));
  return Json{{"recording", found[0].path},
              {"inputs", result.inputs},
              {"events", result.events},
              {"equal", !result.difference},
              {"difference", result.difference ? shown(found[0], *result.difference) : Json()}};
}

std::string show_models(const Json& json) {
  const auto share = [&](const Json& count) {
    return fmt::format("{} ({:.1f} %)", cell(count),
                       100 * count.get<double>() / std::max(json["prompt_blocks"].get<double>(), 1.0));
  };
  std::vector<Row> rows = {{"TIERS", "DEVICE", "HOST", "DISK", "FOUND ON DEVICE", "IN HOST MEMORY", "ON DISK"}};
  for (const Json& model : json["models"]) {
    const Json& blocks = model["blocks"];
    const Json& found = model["found"];
    rows.push_back({rows.size() == 1 ? "as recorded" : "what if", cell(blocks["device"]), cell(blocks["host"]),
                    cell(blocks["disk"]), share(found["device"]), share(found["host"]), share(found["disk"])});
  }
  const Json& recorded = json["recorded"];
  return fmt::format(
      "{} requests with {} blocks of prompts, by a model\n{}the engine found {} in host memory, {} on disk\n",
      cell(json["requests"]), cell(json["prompt_blocks"]), table(rows), cell(recorded["host"]), cell(recorded["disk"]));
}

std::string show(const Json& json) {
  if (json.contains("models")) return show_models(json);
  if (json["equal"])
    return fmt::format("{} inputs, {} events: each equal, all bytes of it\n", cell(json["inputs"]),
                       cell(json["events"]));
  const Json& difference = json["difference"];
  std::string text = fmt::format("event {} differs; before it:\n", cell(difference["event"]));
  for (const Json& event : difference["before"]) text += "  " + cell(event) + '\n';
  text += fmt::format("- {}\n+ {}\n", cell(difference["recorded"]), cell(difference["replayed"]));
  return text;
}

}  // namespace

Verb replay_verb() {
  return {.name = "replay",
          .help =
              "gives what a reference engine was given to another one, and compares every event; or what other tiers "
              "would have held",
          .json =
              "recording, inputs, events, equal, difference: {event, before, recorded, replayed}; of other tiers: "
              "recording, requests, prompt_blocks, recorded, models: [{blocks, found}]",
          .declare =
              [](CLI::App& app, Arguments& a) {
                app.add_option("path", a.path, "a recording of a reference engine, as of torpor mock")->required();
                app.add_option("--host-blocks", a.host_blocks,
                               "what if: host memory had room for so many blocks; of a recording with events_keys");
                app.add_option("--disk-blocks", a.disk_blocks, "what if: the disk");
                app.add_option("--device-blocks", a.device_blocks, "what if: the device");
              },
          .ask = replay,
          .show = show,
          .exit = [](const Json& json) { return json.value("equal", true) ? kFine : kDiffers; }};
}

}  // namespace torpor::cli
