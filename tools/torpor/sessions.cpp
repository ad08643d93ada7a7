// SPDX-License-Identifier: Apache-2.0
// sessions: the images of hibernated requests beside a directory's checkpoints; or those of a server, and its sessions
// in tiers.
#include <fmt/core.h>

#include "checkpoint/image_store.h"
#include "tools/torpor/remote.h"
#include "tools/torpor/text.h"

namespace torpor::cli {
namespace {

// Return the requests that have not ended since.
Result<Json> requests_of(const Context& context, const ImageInfo& info) {
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint, open_checkpoint(context.file_system, info.path, context.key));
  TORPOR_ASSIGN_OR_RETURN(const EngineCheckpoint engine, checkpoint.read_state());
  Json requests = Json::array();
  int32_t position = 0;
  for (const RequestState& request : engine.state.scheduler.requests) {
    if (info.ended.contains(position++)) continue;
    requests.push_back({{"id", request.id},
                        {"prompt_tokens", request.prompt_token_ids.size()},
                        {"output_tokens", request.output_token_ids.size()},
                        {"computed_tokens", request.num_computed_tokens}});
  }
  return requests;
}

Result<Json> sessions(const Context& context) {
  if (is_url(context.arguments.path)) return sessions_of_server(context);
  TORPOR_RETURN_IF_ERROR(context.file_system.open_directory(context.arguments.path, /*create=*/false));
  const ImageStore store(context.file_system, context.arguments.path, {.key = context.key});
  TORPOR_ASSIGN_OR_RETURN(const std::vector<ImageInfo> found, store.list());
  Json images = Json::array();
  for (const ImageInfo& info : found) {
    Json entry = {{"id", info.name}, {"path", info.path}};
    const Result<Json> requests = info.readable ? requests_of(context, info) : Result<Json>(info.problem);
    entry["readable"] = requests.has_value();
    if (requests) {
      entry.update({{"created", time_text(info.created_unix_seconds)}, {"bytes", info.bytes}, {"requests", *requests}});
    } else {
      entry["problem"] = cli::to_json(requests.error());
    }
    images.push_back(std::move(entry));
  }
  return Json{{"directory", context.arguments.path}, {"images", std::move(images)}};
}

std::string size_in(const Json& session, const char* field) {
  const Json bytes = session.value(field, Json());
  return bytes.is_number() ? size_text(bytes) : "";
}

std::string show_tiers(const Json& sessions) {
  std::vector<Row> rows = {{"SESSION", "TIER", "SIZE", "DEVICE", "HOST", "DISK", "REMOTE", "RUNNING", "HELD"}};
  for (const Json& each : sessions) {
    Row row = {cell(each.value("id", Json())), cell(each.value("tier", Json()))};
    for (const char* const field : {"bytes", "device_bytes", "host_bytes", "disk_bytes", "kv_store_bytes"})
      row.push_back(size_in(each, field));
    row.push_back(cell(each.value("running", Json())));
    const Json held = each.value("held", Json());
    const Json left = each.value("seconds_left", Json());
    const bool is_held = held.is_string() && !held.get<std::string>().empty() && left.is_number();
    row.push_back(is_held ? fmt::format("{}, {:.0f} s", cell(held), left.get<double>()) : "");
    rows.push_back(std::move(row));
  }
  return table(rows);
}

std::string show_sessions_of_server(const Json& json) {
  const std::string tiers = json["sessions"].empty() ? "" : show_tiers(json["sessions"]);
  if (json["images"].empty()) return tiers.empty() ? fmt::format("no images in {}\n", cell(json["url"])) : tiers;
  std::vector<Row> rows = {{"IMAGE", "TIER", "SIZE", "TOKENS", "REQUEST"}};
  for (const Json& image : json["images"]) {
    Row first = {cell(image.value("id", Json())), cell(image.value("tier", Json())),
                 image.contains("bytes") && image["bytes"].is_number() ? size_text(image["bytes"]) : "",
                 cell(image.value("tokens", Json()))};
    const Json requests = image.value("requests", Json::array());
    for (const Json& request : requests) {
      first.push_back(cell(request));
      rows.push_back(std::exchange(first, {"", "", "", ""}));
    }
  }
  return tiers.empty() ? table(rows) : table(rows) + "\n" + tiers;
}

std::string show_sessions(const Json& json) {
  if (json.contains("url")) return show_sessions_of_server(json);
  if (json["images"].empty()) return fmt::format("no images in {}\n", cell(json["directory"]));
  std::vector<Row> rows = {{"IMAGE", "CREATED", "SIZE", "REQUEST", "PROMPT", "OUTPUT", "COMPUTED"}};
  for (const Json& image : json["images"]) {
    if (!image["readable"]) {
      rows.push_back(
          {cell(image["id"]), bad(fmt::format("{}:", cell(image["problem"]["code"]))), cell(image["problem"]["what"])});
      continue;
    }
    Row first = {cell(image["id"]), cell(image["created"]), size_text(image["bytes"])};
    for (const Json& request : image["requests"]) {
      first.insert(first.end(), {cell(request["id"]), cell(request["prompt_tokens"]), cell(request["output_tokens"]),
                                 cell(request["computed_tokens"])});
      rows.push_back(std::exchange(first, {"", "", ""}));
    }
  }
  return table(rows);
}

}  // namespace

Verb sessions_verb() {
  return {.name = "sessions",
          .help =
              "the images of hibernated requests of a directory or a server, and a server's sessions in tiers; info, "
              "requests and verify look into an image on disk",
          .json =
              "directory, images: [{id, path, readable, created, bytes, requests: [{id, prompt_tokens, output_tokens, "
              "computed_tokens}] | problem}]; of a server url, images: [{id, requests, tier, bytes, tokens, path}], "
              "sessions: [{id, tier, bytes, device_bytes, host_bytes, disk_bytes, kv_store_bytes, running, held, "
              "seconds_left}]",
          .declare =
              [](CLI::App& app, Arguments& a) {
                app.add_option("directory", a.path,
                               "a directory of checkpoints, or the URL of a server: it is asked with the key in "
                               "TORPOR_ADMIN_KEY or TORPOR_API_KEY")
                    ->required();
              },
          .ask = sessions,
          .show = show_sessions};
}

}  // namespace torpor::cli
