// SPDX-License-Identifier: Apache-2.0
// repair, gc, rm: the verbs that change a directory of checkpoints.
#include <fmt/core.h>
#include <fmt/ranges.h>

#include "checkpoint/image_section.h"
#include "checkpoint/image_store.h"
#include "checkpoint/repair.h"
#include "checkpoint/store_names.h"
#include "tools/torpor/remote.h"
#include "tools/torpor/text.h"

namespace torpor::cli {
namespace {

std::string parent_of(const std::string& path) { return path.substr(0, std::max<size_t>(path.rfind('/'), 1)); }

Result<Json> repair(const Context& context) {
  const Arguments& arguments = context.arguments;
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                          open_checkpoint(context.file_system, arguments.path, context.key));
  if (is_image(checkpoint.manifest())) {
    return Error{.code = Code::kUnsupported,
                 .what = fmt::format("{} is an image of hibernated requests", checkpoint.path()),
                 .next_step = "if it is damaged, remove its directory and send its requests again"};
  }
  const VerifyOptions options{.threads = arguments.threads, .progress = context.progress};
  TORPOR_ASSIGN_OR_RETURN(const Verification found, verify(checkpoint, options));
  TORPOR_ASSIGN_OR_RETURN(const RepairPlan plan, plan_repair(checkpoint, found));
  Json dropped = Json::array();
  for (const DroppedRequest& request : plan.dropped_requests)
    dropped.push_back({{"id", request.id}, {"why", request.why}});
  Json json = {{"path", checkpoint.path()},
               {"damaged", !found.problems.empty()},
               {"kept_requests", plan.state.state.scheduler.requests.size()},
               {"dropped_requests", std::move(dropped)},
               {"dropped_blocks", plan.dropped_blocks},
               {"dropped_tags", plan.dropped_tags},
               {"repaired", nullptr},
               {"problems_left", Json::array()}};
  if (found.problems.empty() || arguments.dry_run) return json;
  const std::string target = arguments.second.empty() ? parent_of(checkpoint.path()) : arguments.second;
  TORPOR_ASSIGN_OR_RETURN(const auto manager, CheckpointManager::open(context.file_system, target,
                                                                      {.key = context.key,
                                                                       .encrypt = checkpoint.manifest().protection ==
                                                                                  Protection::kEncrypted,
                                                                       .progress = context.progress}));
  TORPOR_ASSIGN_OR_RETURN(const std::string repaired, write_repaired(checkpoint, plan, *manager));
  json["repaired"] = repaired;
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint written, open_checkpoint(context.file_system, repaired, context.key));
  TORPOR_ASSIGN_OR_RETURN(const Verification left, verify(written, options));
  for (const Error& problem : left.problems) json["problems_left"].push_back(to_json(problem));
  return json;
}

std::string show_repair(const Json& json) {
  if (!json["damaged"]) return fmt::format("{}: {}, nothing to repair\n", cell(json["path"]), good("whole"));
  std::string text = fmt::format("{} requests kept, {} dropped; {} blocks dropped\n", cell(json["kept_requests"]),
                                 json["dropped_requests"].size(), json["dropped_blocks"].size());
  for (const Json& request : json["dropped_requests"])
    text += fmt::format("  {}: {}\n", cell(request["id"]), cell(request["why"]));
  for (const Json& tag : json["dropped_tags"])
    text += fmt::format("  saved memory of {} dropped: a new engine has its own\n", cell(tag));
  if (json["repaired"].is_null()) return text + "nothing was written (--dry-run)\n";
  text += fmt::format("written: {}\n", cell(json["repaired"]));
  if (json["problems_left"].empty()) return text;
  text +=
      fmt::format("{}, which a repair cannot mend:\n", bad(fmt::format("{} problems", json["problems_left"].size())));
  for (const Json& problem : json["problems_left"])
    text += fmt::format("  {}: {}\n", cell(problem["code"]), cell(problem["what"]));
  return text;
}

CheckpointManagerOptions manager_options(const Context& context) {
  const Arguments& arguments = context.arguments;
  CheckpointManagerOptions options{.retention = {.keep = arguments.keep}, .key = context.key};
  if (arguments.max_age_seconds >= 0) options.retention.max_age_seconds = arguments.max_age_seconds;
  if (arguments.max_total_bytes > 0) options.retention.max_total_bytes = arguments.max_total_bytes;
  return options;
}

Error for_a_store_only() {
  return {.code = Code::kInvalidArgument, .what = "--force is for object stores", .next_step = "leave it out"};
}

Result<Json> gc(const Context& context) {
  if (is_url(context.arguments.path)) return gc_of_store(context);
  if (context.arguments.force) return for_a_store_only();
  TORPOR_ASSIGN_OR_RETURN(const auto manager, CheckpointManager::open(context.file_system, context.arguments.path,
                                                                      manager_options(context)));
  TORPOR_ASSIGN_OR_RETURN(std::vector<std::string> gone, manager->collect(context.arguments.dry_run));
  ImageStore images(context.file_system, context.arguments.path, {.key = context.key});
  TORPOR_ASSIGN_OR_RETURN(const std::vector<std::string> leftovers, images.remove_leftovers(context.arguments.dry_run));
  for (const std::string& name : leftovers) gone.push_back(fmt::format("{}/{}", kImagesDirectory, name));
  TORPOR_ASSIGN_OR_RETURN(const std::vector<CheckpointInfo> left, manager->list());
  Json kept = Json::array();
  for (const CheckpointInfo& info : left) kept.push_back(info.name);
  return Json{{"directory", context.arguments.path},
              {"dry_run", context.arguments.dry_run},
              {"removed", gone},
              {"left", std::move(kept)}};
}

std::string show_gc(const Json& json) {
  if (json.contains("url")) return show_gc_of_store(json);
  std::string text;
  for (const Json& name : json["removed"])
    text += fmt::format("{} {}\n", json["dry_run"] ? "would remove" : "removed", cell(name));
  return text + fmt::format("{} checkpoints {}\n", json["left"].size(), json["dry_run"] ? "are there" : "are left");
}

Result<Json> rm(const Context& context) {
  if (is_url(context.arguments.path)) return rm_of_store(context);
  if (context.arguments.force) return for_a_store_only();
  std::string path = context.arguments.path;
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  const size_t slash = path.rfind('/');
  const std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
  const std::optional<uint64_t> generation = generation_of(name);
  if (!generation)
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("{} is not a checkpoint", path),
                 .next_step = "name one checkpoint, as DIRECTORY/g-000001"};
  TORPOR_ASSIGN_OR_RETURN(
      const auto manager,
      CheckpointManager::open(context.file_system,
                              slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1)),
                              {.key = context.key}));
  TORPOR_RETURN_IF_ERROR(manager->remove(*generation, context.arguments.dry_run));
  return Json{{"removed", name}, {"dry_run", context.arguments.dry_run}};
}

}  // namespace

Verb repair_verb() {
  return {
      .name = "repair",
      .help = "writes a new checkpoint with the requests that are whole, and says which are not; the damaged one stays",
      .json =
          "path, damaged, kept_requests, dropped_requests: [{id, why}], dropped_blocks, dropped_tags, repaired, "
          "problems_left: [{code, what, next_step}]",
      .declare =
          [](CLI::App& app, Arguments& a) {
            declare_path(app, a);
            app.add_option("--to", a.second, "directory of checkpoints for the new one; default: the same")
                ->type_name("DIRECTORY");
            app.add_flag("-n,--dry-run", a.dry_run, "only says what would be kept");
            app.add_option("--threads", a.threads, "that read and hash")->check(CLI::Range(0, 256));
          },
      .ask = repair,
      .show = show_repair,
      .exit =
          [](const Json& json) {
            const bool still = json["repaired"].is_null() || !json["problems_left"].empty();
            return json["damaged"] && still ? kDamaged : kFine;
          }};
}
Verb gc_verb() {
  return {.name = "gc",
          .help =
              "removes leftovers, and checkpoints that are not to be kept; never the last good one. Of a URL: what no "
              "checkpoint names, while nobody pushes",
          .json =
              "directory, dry_run, removed, left; of a URL: url, dry_run, removed, left, removed_parts, "
              "removed_answers",
          .declare =
              [](CLI::App& app, Arguments& a) {
                a.keep = kKeepAll;
                app.add_option("directory", a.path, "a directory of checkpoints, or the URL of a store")->required();
                app.add_option("--keep", a.keep, "so many of the newest; default: all")->check(CLI::Range(1, kKeepAll));
                app.add_flag("--force", a.force, "of a URL: also what its owner goes on from");
                app.add_option("--max-age", a.max_age_seconds, "seconds, or 36h, 7d; older ones go")
                    ->transform(CLI::AsNumberWithUnit(
                        std::map<std::string, double>{{"s", 1}, {"m", 60}, {"h", 3600}, {"d", 86400}},
                        CLI::AsNumberWithUnit::CASE_SENSITIVE, "TIME"));
                app.add_option("--max-bytes", a.max_total_bytes, "or 500GB; the oldest go until the rest fits")
                    ->transform(CLI::AsSizeValue(false));
                app.add_flag("-n,--dry-run", a.dry_run, "only says what would go");
              },
          .ask = gc,
          .show = show_gc};
}
Verb rm_verb() {
  return {.name = "rm",
          .help = "removes one checkpoint; others that link its files keep them. Of a URL: its parts stay until gc",
          .json = "removed, dry_run",
          .declare =
              [](CLI::App& app, Arguments& a) {
                app.add_option("path", a.path, "the checkpoint, DIRECTORY/g-000001, or URL/NAME")->required();
                app.add_flag("--force", a.force, "of a URL: also what its owner goes on from");
                app.add_flag("-n,--dry-run", a.dry_run, "only says what would go");
              },
          .ask = rm,
          .show =
              [](const Json& json) {
                return fmt::format("{} {}\n", json["dry_run"] ? "would remove" : "removed", cell(json["removed"]));
              }};
}

}  // namespace torpor::cli
