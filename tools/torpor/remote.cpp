// SPDX-License-Identifier: Apache-2.0
// push, pull, and ls, gc and rm of a URL: checkpoints in an object store. sessions of a URL: a server's images, and its
// sessions in tiers.
#include "tools/torpor/remote.h"

#include <algorithm>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "engine/delivery/owner_processes.h"
#include "remote/checkpoint_copies.h"
#include "remote/environment.h"
#include "remote/http_get.h"
#include "remote/open_store.h"
#include "remote/store_removal.h"
#include "tools/torpor/fits.h"
#include "tools/torpor/text.h"

namespace torpor::cli {
namespace {

// "s3://bucket/prefix/NAME" may name one checkpoint of a store: what list_pushed() calls it.
struct Named {
  std::string url;
  std::string name;
};
Named named(std::string url) {
  while (url.ends_with('/') && !url.ends_with("//")) url.pop_back();
  const size_t slash = url.rfind('/');
  const std::string last = url.substr(slash + 1);
  if (remote::is_index_name(last)) return {url.substr(0, slash), last};
  return {std::move(url), ""};
}

// Of who puts nothing there: a bucket or directory that is not there is refused, and not made.
Result<std::unique_ptr<remote::ObjectStore>> existing_store(const Context& context, const std::string& url) {
  TORPOR_ASSIGN_OR_RETURN(auto store, remote::open_object_store(context.file_system, url, context.interrupted));
  TORPOR_RETURN_IF_ERROR(store->check_exists());
  return store;
}

remote::CopyOptions options_of(const Context& context) {
  remote::CopyOptions options{.key = context.key, .progress = context.progress};
  if (context.arguments.threads > 0) options.threads = context.arguments.threads;
  return options;
}

Json report_of(const std::string& url, const remote::CopyReport& report) {
  return {{"url", url},
          {"name", report.name},
          {"path", report.path},
          {"bytes", report.bytes},
          {"moved_bytes", report.moved_bytes},
          {"was_there", report.was_there}};
}

std::string show_report(const Json& json) {
  const std::string name = fmt::format("{}/{}", cell(json["url"]), cell(json["name"]));
  if (json["was_there"]) return fmt::format("{} was there already: {}\n", name, cell(json["path"]));
  return fmt::format("{}: {}, {} moved, {}\n", name, size_text(json["bytes"]), size_text(json["moved_bytes"]),
                     cell(json["path"]));
}

std::string show_pull(const Json& json) {
  const std::string text = show_report(json);
  return json["was_there"] ? text + "its saved memory was not read again: torpor verify does\n" : text;
}

Result<Json> push(const Context& context) {
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                          open_checkpoint(context.file_system, context.arguments.path, context.key));
  TORPOR_ASSIGN_OR_RETURN(
      const auto store, remote::open_object_store(context.file_system, context.arguments.second, context.interrupted));
  TORPOR_ASSIGN_OR_RETURN(const remote::CopyReport report,
                          remote::push(context.file_system, checkpoint, *store, options_of(context)));
  return report_of(store->url(), report);
}

Result<Json> pull(const Context& context) {
  const Arguments& arguments = context.arguments;
  const Named from = named(arguments.path);
  TORPOR_ASSIGN_OR_RETURN(const auto store, existing_store(context, from.url));
  remote::CopyOptions options = options_of(context);
  if (asks_for_fit(arguments)) {
    options.accept = [&](const Manifest& manifest) -> Status {
      TORPOR_ASSIGN_OR_RETURN(const Json found, check_fit(arguments, manifest, arguments.path));
      if (found["fits"]) return ok();
      std::vector<std::string> differ;
      for (const Json& check : found["checks"]) {
        if (!check["fits"])
          differ.push_back(fmt::format("{} is {} there and {} here", cell(check["field"]), cell(check["checkpoint"]),
                                       cell(check["here"])));
      }
      return Error{.code = Code::kIncompatible,
                   .what = fmt::format("it does not fit: {}", fmt::join(differ, "; ")),
                   .next_step = "nothing of its memory was fetched; take another checkpoint or another configuration"};
    };
  }
  TORPOR_ASSIGN_OR_RETURN(const remote::CopyReport report,
                          remote::pull(context.file_system, *store, from.name, arguments.output, options));
  return report_of(store->url(), report);
}

// Whether others of the store can be listed all the same.
bool is_of_this_checkpoint(const Error& error) {
  return error.code == Code::kCorruption || error.code == Code::kIncompatible || error.code == Code::kUnauthenticated ||
         error.code == Code::kNotFound;  // it went meanwhile
}

// Return the error that a server of torpor, or vLLM's routes, answered. `keys`: which variable has to have which key.
Error error_of(const std::string& url, const remote::HttpAnswer& answer, std::string_view keys) {
  const Json content = Json::parse(answer.body, nullptr, false);
  const Json reported = content.is_object() ? content.value("error", Json()) : Json();
  if (answer.status == 401 || answer.status == 403) {
    // The server's next step for a 401 says how HTTP sends a key; a user of this program sets a variable.
    const bool apart = answer.status == 401 && reported.is_object() && reported.contains("what");
    const Json why = reported.is_object() ? reported.value(apart ? "what" : "message", Json()) : reported;
    return {.code = Code::kUnauthenticated,
            .what = why.is_string() ? fmt::format("{}: {}", url, cell(why))
                                    : fmt::format("{} refuses the key ({})", url, answer.status),
            .next_step = fmt::format("set {}", keys)};
  }
  if (!reported.is_object() || !reported.value("what", Json()).is_string())
    return {.code = Code::kInternal,
            .what = fmt::format("{} answers {}", url, answer.status),
            .next_step = "see whether it is a server of torpor"};
  Error error{.code = Code::kInternal,
              .what = fmt::format("{}: {}", url, cell(reported["what"])),
              .next_step = reported.contains("next_step") ? cell(reported["next_step"]) : std::string()};
  for (int code = 0; code <= static_cast<int>(kLastCode); ++code) {
    if (reported.contains("code") && reported["code"] == std::string(name(static_cast<Code>(code))))
      error.code = static_cast<Code>(code);
  }
  return error;
}

constexpr std::string_view kAdminKey = "TORPOR_ADMIN_KEY to the server's admin key";
constexpr std::string_view kEitherKey =
    "TORPOR_ADMIN_KEY to the server's admin key, or TORPOR_API_KEY to a client's key";

}  // namespace

Result<Json> sessions_of_server(const Context& context) {
  std::string url = context.arguments.path;
  while (url.ends_with('/')) url.pop_back();
  const std::optional<std::string> admin = remote::environment("TORPOR_ADMIN_KEY");
  const std::string key = admin ? *admin : remote::environment("TORPOR_API_KEY").value_or("");
  TORPOR_ASSIGN_OR_RETURN(const remote::HttpAnswer answer,
                          remote::http_get(url + "/v1/sessions", key, context.interrupted));
  if (answer.status != 200) return error_of(url, answer, kEitherKey);
  const Json content = Json::parse(answer.body, nullptr, false);
  if (!content.is_object() || !content.contains("data") || !content["data"].is_array())
    return error_of(url, answer, kEitherKey);
  Json images = Json::array();
  Json sessions = Json::array();
  for (const Json& each : content["data"]) {
    if (!each.is_object()) return error_of(url, answer, kEitherKey);
    const bool in_tiers = each.value("object", Json()) == "session";
    Json entry = Json::object();
    for (const char* const field : {"id", "requests", "tier", "bytes", "tokens", "path", "device_bytes", "host_bytes",
                                    "disk_bytes", "kv_store_bytes", "running", "held", "seconds_left"}) {
      if (each.contains(field)) entry[field] = each[field];
    }
    (in_tiers ? sessions : images).push_back(std::move(entry));
  }
  return Json{{"url", url}, {"images", std::move(images)}, {"sessions", std::move(sessions)}};
}

namespace {

// The address that the owner of a directory has recorded there.
Result<std::string> address_of_owner(const Context& context, const std::string& directory) {
  OwnerWatch watch(context.file_system, system_clock(), directory);
  TORPOR_ASSIGN_OR_RETURN(const OwnerLook owner, watch.wait(std::chrono::nanoseconds(0)));
  if (owner.state != OwnerState::kServes)
    return Error{.code = Code::kNotFound,
                 .what = fmt::format("{}: no server serves it: {}", directory, owner.why),
                 .next_step = "start one with --torpor-checkpoint-dir, or give the URL of the server"};
  if (owner.address.empty())
    return Error{.code = Code::kNotFound,
                 .what = fmt::format("{}: its server (process {}) has recorded no address", directory, owner.pid),
                 .next_step = "give the URL of the server"};
  return owner.address;
}

// Return whether an answer of POST /torpor/switch has what show_switch() shows.
bool is_switch_report(const Json& content) {
  if (!content.is_object()) return false;
  for (const char* const field : {"to", "process", "requests", "parts"}) {
    if (!content.contains(field)) return false;
  }
  for (const char* const field : {"seconds", "pause_seconds"}) {
    if (!content.contains(field) || !content[field].is_number()) return false;
  }
  const Json& parts = content["parts"];
  return parts.is_object() &&
         std::all_of(parts.begin(), parts.end(), [](const Json& each) { return each.is_number(); });
}

}  // namespace

Result<Json> switch_server(const Context& context) {
  std::string url = context.arguments.path;
  if (!is_url(url)) {
    TORPOR_ASSIGN_OR_RETURN(url, address_of_owner(context, url));
  }
  while (url.ends_with('/')) url.pop_back();
  std::string route = url + "/torpor/switch";
  if (const std::string& to = context.arguments.second; !to.empty()) route += "?to=" + to;
  const std::string key = remote::environment("TORPOR_ADMIN_KEY").value_or("");
  TORPOR_ASSIGN_OR_RETURN(const remote::HttpAnswer answer, remote::http_post(route, key, context.interrupted));
  const Json content = Json::parse(answer.body, nullptr, false);
  if (answer.status != 200 || !is_switch_report(content)) return error_of(url, answer, kAdminKey);
  Json report = {{"url", url}};
  for (const char* const field : {"to", "process", "requests", "kv", "seconds", "pause_seconds", "parts"}) {
    if (content.contains(field)) report[field] = content[field];
  }
  return report;
}

bool is_url(const std::string& path) { return path.find("://") != std::string::npos; }

Result<Json> ls_of_store(const Context& context) {
  TORPOR_ASSIGN_OR_RETURN(const auto store, existing_store(context, context.arguments.path));
  TORPOR_ASSIGN_OR_RETURN(const std::vector<remote::PushedCheckpoint> pushed, remote::list_pushed(*store));
  Json checkpoints = Json::array();
  for (const remote::PushedCheckpoint& each : pushed) {
    Json entry = {{"name", each.name}, {"readable", each.readable}};
    if (each.readable) {
      entry.update({{"generation", each.index.generation},
                    {"created", time_text(each.index.created_unix_seconds)},
                    {"creator", each.index.creator},
                    {"id", each.index.id},
                    {"bytes", each.index.bytes()}});
      const Result<Metadata> metadata = remote::metadata_of(*store, each.index, context.key.get());
      if (metadata) {
        entry["metadata"] = metadata_json(*metadata);
      } else if (is_of_this_checkpoint(metadata.error())) {
        entry["metadata_problem"] = to_json(metadata.error());
      } else {
        return metadata.error();
      }
    } else {
      entry["problem"] = to_json(each.problem);
    }
    checkpoints.push_back(std::move(entry));
  }
  return Json{{"url", store->url()}, {"checkpoints", std::move(checkpoints)}};
}

std::string show_ls_of_store(const Json& json) {
  if (json["checkpoints"].empty()) return fmt::format("no checkpoints in {}\n", cell(json["url"]));
  std::vector<Row> rows = {{"NAME", "CREATED", "SIZE", "CREATOR"}};
  const bool labelled = std::any_of(json["checkpoints"].begin(), json["checkpoints"].end(), [](const Json& entry) {
    return entry.contains("metadata_problem") || (entry.contains("metadata") && !entry["metadata"].empty());
  });
  if (labelled) rows[0].push_back("METADATA");
  for (const Json& entry : json["checkpoints"]) {
    if (entry["readable"]) {
      rows.push_back({cell(entry["name"]), cell(entry["created"]), size_text(entry["bytes"]), cell(entry["creator"])});
      if (labelled)
        rows.back().push_back(entry.contains("metadata") ? metadata_text(entry["metadata"])
                                                         : bad(cell(entry["metadata_problem"]["code"])));
    } else {
      rows.push_back({cell(entry["name"]), bad(cell(entry["problem"]["what"])), "", ""});
    }
  }
  return table(rows);
}

Result<Json> gc_of_store(const Context& context) {
  const Arguments& arguments = context.arguments;
  if (arguments.max_age_seconds >= 0 || arguments.max_total_bytes > 0)
    return Error{.code = Code::kInvalidArgument,
                 .what = "--max-age and --max-bytes are for a directory",
                 .next_step = "use --keep"};
  TORPOR_ASSIGN_OR_RETURN(const auto store, existing_store(context, arguments.path));
  TORPOR_ASSIGN_OR_RETURN(const remote::RemovalReport report,
                          remote::remove_unnamed(*store, system_clock(),
                                                 {.force = arguments.force,
                                                  .dry_run = arguments.dry_run,
                                                  .keep = arguments.keep == kKeepAll ? 0 : arguments.keep}));
  return Json{{"url", store->url()}, {"dry_run", arguments.dry_run},  {"removed", report.checkpoints},
              {"left", report.left}, {"removed_parts", report.parts}, {"removed_answers", report.answers}};
}

std::string show_gc_of_store(const Json& json) {
  const std::string removed = json["dry_run"] ? "would remove" : "removed";
  std::string text;
  for (const Json& name : json["removed"]) text += fmt::format("{} {}\n", removed, cell(name));
  return text + fmt::format("{} {} parts and {} logs of answers that nothing names; {} checkpoints are left\n", removed,
                            cell(json["removed_parts"]), cell(json["removed_answers"]), cell(json["left"]));
}

Result<Json> rm_of_store(const Context& context) {
  const Arguments& arguments = context.arguments;
  const Named from = named(arguments.path);
  if (from.name.empty())
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("{} is not a checkpoint", arguments.path),
                 .next_step = "name one of a store, as URL/NAME; torpor ls says the names"};
  TORPOR_ASSIGN_OR_RETURN(const auto store, existing_store(context, from.url));
  TORPOR_RETURN_IF_ERROR(remote::remove_pushed(*store, from.name, system_clock(),
                                               {.force = arguments.force, .dry_run = arguments.dry_run}));
  return Json{{"removed", from.name}, {"dry_run", arguments.dry_run}};
}

Verb push_verb() {
  return {
      .name = "push",
      .help =
          "copies a checkpoint into an object store; what is there already is not sent again, and what is gone from "
          "there since is",
      .json = "url, name, path, bytes, moved_bytes, was_there",
      .declare =
          [](CLI::App& app, Arguments& a) {
            declare_path(app, a);
            app.add_option("url", a.second, "s3://BUCKET/PREFIX, or file:///DIRECTORY that machines share")->required();
            app.add_option("--threads", a.threads, "and connections; default: 4")->check(CLI::Range(1, 64));
          },
      .ask = push,
      .show = show_report};
}
Verb pull_verb() {
  return {
      .name = "pull",
      .help =
          "copies a checkpoint out of an object store: the newest generation of a directory; goes on where an "
          "interrupted one was. Of one that is here already the saved memory is not read again: verify does. With "
          "--model, --like, --field or --memory: only if it fits",
      .json = "url, name, path, bytes, moved_bytes, was_there",
      .declare =
          [](CLI::App& app, Arguments& a) {
            app.add_option("url", a.path, "as of push, of which the newest is taken; or with /NAME, as ls says it")
                ->required();
            app.add_option("directory", a.output, "a directory of checkpoints; made if it is not there")->required();
            declare_fit(app, a);
            app.add_option("--threads", a.threads, "and connections; default: 4")->check(CLI::Range(1, 64));
          },
      .ask = pull,
      .show = show_pull};
}

}  // namespace torpor::cli
