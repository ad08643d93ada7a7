// SPDX-License-Identifier: Apache-2.0
// ls, info, tree, du: what checkpoints there are and what is in them.
#include <map>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "checkpoint/checkpoint_manager.h"
#include "checkpoint/image_section.h"
#include "checkpoint/store_names.h"
#include "scheduler_state/fork_ancestry.h"
#include "tools/torpor/images.h"
#include "tools/torpor/remote.h"
#include "tools/torpor/text.h"

namespace torpor::cli {
namespace {

Json summary(const Manifest& manifest, uint64_t bytes) {
  return {{"generation", manifest.generation},
          {"created", time_text(manifest.created_unix_seconds)},
          {"creator", manifest.creator},
          {"format_version", manifest.format_version},
          {"protection", name(manifest.protection)},
          {"owner", manifest.owner.hex()},
          {"id", hex(manifest.id)},
          {"bytes", bytes},
          {"linked_bytes", manifest.linked_bytes()},
          {"ranks", manifest.ranks.size()}};
}

Json memory_of(const Manifest& manifest) {
  Json memory = Json::array();
  for (const RankSummary& rank : manifest.ranks) {
    for (const auto& [tag, sums] : rank.tags) {
      memory.push_back({{"rank", rank.rank},
                        {"tag", tag},
                        {"chunks", sums.records},
                        {"bytes", sums.bytes},
                        {"stored_bytes", sums.stored_bytes},
                        {"in_links_bytes", sums.linked_bytes}});
    }
  }
  return memory;
}

Json sections_of(const Manifest& manifest) {
  Json sections = Json::array();
  for (const SectionInfo& section : manifest.sections) {
    sections.push_back({{"name", section.name},
                        {"bytes", section.bytes},
                        {"stored_bytes", section.stored_bytes},
                        {"codec", name(section.codec)},
                        {"required", section.required}});
  }
  return sections;
}

Result<Json> ls(const Context& context) {
  if (is_url(context.arguments.path)) return ls_of_store(context);
  TORPOR_ASSIGN_OR_RETURN(const auto manager,
                          CheckpointManager::open(context.file_system, context.arguments.path, {.key = context.key}));
  TORPOR_ASSIGN_OR_RETURN(const std::vector<CheckpointInfo> found, manager->list());
  Json checkpoints = Json::array();
  for (const CheckpointInfo& checkpoint : found) {
    Json entry = {{"name", checkpoint.name},
                  {"path", checkpoint.path},
                  {"readable", checkpoint.readable},
                  {"woken", checkpoint.woken}};
    if (checkpoint.readable) {
      entry.update(summary(checkpoint.manifest, checkpoint.bytes));
      entry["metadata"] = metadata_json(checkpoint.metadata);
    } else {
      entry["problem"] = to_json(checkpoint.problem);
    }
    checkpoints.push_back(std::move(entry));
  }
  return Json{{"directory", context.arguments.path}, {"checkpoints", std::move(checkpoints)}};
}

std::string show_ls(const Json& json) {
  if (json.contains("url")) return show_ls_of_store(json);
  if (json["checkpoints"].empty()) return fmt::format("no checkpoints in {}\n", cell(json["directory"]));
  std::vector<Row> rows = {{"NAME", "CREATED", "SIZE", "LINKED", "RANKS", "SEAL", "WOKEN", "OWNER", "CREATOR"}};
  const bool labelled = std::any_of(json["checkpoints"].begin(), json["checkpoints"].end(), [](const Json& entry) {
    return entry.contains("metadata") && !entry["metadata"].empty();
  });
  if (labelled) rows[0].push_back("METADATA");
  for (const Json& entry : json["checkpoints"]) {
    if (entry["readable"]) {
      rows.push_back({cell(entry["name"]), cell(entry["created"]), size_text(entry["bytes"]),
                      size_text(entry["linked_bytes"]), cell(entry["ranks"]), cell(entry["protection"]),
                      entry["woken"] ? "yes" : "no", cell(entry["owner"]).substr(0, 8), cell(entry["creator"])});
      if (labelled) rows.back().push_back(metadata_text(entry["metadata"]));
    } else {
      rows.push_back({cell(entry["name"]), bad(fmt::format("{}:", cell(entry["problem"]["code"]))),
                      cell(entry["problem"]["what"])});
    }
  }
  return table(rows);
}

Result<Json> info(const Context& context) {
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                          open_checkpoint(context.file_system, context.arguments.path, context.key));
  TORPOR_ASSIGN_OR_RETURN(const EngineCheckpoint engine, checkpoint.read_state());
  const SchedulerSnapshot& scheduler = engine.state.scheduler;
  const KvSnapshot& kv = engine.state.kv;
  size_t prompt = 0;
  size_t output = 0;
  for (const RequestState& request : scheduler.requests) {
    prompt += request.prompt_token_ids.size();
    output += request.output_token_ids.size();
  }
  Json json = {{"path", checkpoint.path()}};
  json.update(summary(checkpoint.manifest(), checkpoint.manifest().total_bytes()));
  json["requests"] = {{"running", scheduler.running.size()},
                      {"waiting", scheduler.waiting.size()},
                      {"held", scheduler.held.size()},
                      {"tokens", prompt + output},
                      {"prompt_tokens", prompt},
                      {"output_tokens", output}};
  json["kv"] = {
      {"num_blocks", kv.num_blocks}, {"kept_blocks", kv.blocks.size()}, {"prefix_entries", kv.prefix_index.size()}};
  json["sections"] = sections_of(checkpoint.manifest());
  json["memory"] = memory_of(checkpoint.manifest());
  json["metadata"] = metadata_json(engine.metadata);
  json["fingerprint"] = engine.fingerprint;
  return json;
}

std::string show_info(const Json& json) {
  std::string text = fmt::format("{}\n  created {} by {}, format {}, seal: {}, {}\n", cell(json["path"]),
                                 cell(json["created"]), cell(json["creator"]), cell(json["format_version"]),
                                 cell(json["protection"]), size_text(json["bytes"]));
  if (json["linked_bytes"] != 0)
    text += fmt::format("  and {} in files that earlier checkpoints wrote\n", size_text(json["linked_bytes"]));
  const Json& requests = json["requests"];
  text += fmt::format("  {} requests running, {} waiting, {} held; {} prompt and {} output tokens\n",
                      cell(requests["running"]), cell(requests["waiting"]), cell(requests["held"]),
                      cell(requests["prompt_tokens"]), cell(requests["output_tokens"]));
  text += fmt::format("  {} of {} KV blocks kept, {} entries in the prefix index\n", cell(json["kv"]["kept_blocks"]),
                      cell(json["kv"]["num_blocks"]), cell(json["kv"]["prefix_entries"]));
  std::vector<Row> memory = {{"RANK", "TAG", "CHUNKS", "BYTES", "STORED", "IN LINKS"}};
  for (const Json& entry : json["memory"]) {
    memory.push_back({cell(entry["rank"]), cell(entry["tag"]), cell(entry["chunks"]), size_text(entry["bytes"]),
                      size_text(entry["stored_bytes"]), size_text(entry["in_links_bytes"])});
  }
  std::vector<Row> sections = {{"SECTION", "BYTES", "STORED"}};
  for (const Json& entry : json["sections"])
    sections.push_back({cell(entry["name"]), size_text(entry["bytes"]), size_text(entry["stored_bytes"])});
  std::vector<Row> fields = {{"MUST BE EQUAL", "VALUE"}};
  for (const auto& [name, value] : json["fingerprint"].items()) fields.push_back({harmless(name), cell(value)});
  if (!json["metadata"].empty()) text += fmt::format("  metadata: {}\n", metadata_text(json["metadata"]));
  return text + '\n' + table(memory) + '\n' + table(sections) + '\n' + table(fields) +
         "\nnext: torpor fits, torpor requests, torpor verify\n";
}

// {"name", "bytes", "children"}: tags > regions, requests > blocks.
Result<Json> tree(const Context& context) {
  if (is_directory_of_images(context, context.arguments.path)) return tree_of_images(context);
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                          open_checkpoint(context.file_system, context.arguments.path, context.key));
  if (is_image(checkpoint.manifest())) return tree_of_image(context, checkpoint);
  TORPOR_ASSIGN_OR_RETURN(const EngineCheckpoint engine, checkpoint.read_state());
  const auto node = [](std::string name, Json detail) {
    return Json{{"name", std::move(name)}, {"detail", std::move(detail)}, {"children", Json::array()}};
  };
  Json root = node(checkpoint.path(), size_text(checkpoint.manifest().total_bytes()));
  Json state = node("STATE", fmt::format("{} sections", checkpoint.manifest().sections.size()));
  for (const SectionInfo& section : checkpoint.manifest().sections)
    state["children"].push_back(node(section.name, size_text(section.bytes)));
  root["children"].push_back(std::move(state));
  for (const RankSummary& rank : checkpoint.manifest().ranks) {
    TORPOR_ASSIGN_OR_RETURN(const RankRefs refs, checkpoint.refs(rank));
    std::map<std::string, std::map<std::string, uint64_t>> tags;
    for (const SavedChunk& chunk : refs.records)
      tags[chunk.key.tag][chunk.key.kind == ChunkKind::kKvBlock ? "KV blocks" : chunk.key.region] += chunk.bytes;
    Json entry = node(fmt::format("rank {}", rank.rank), fmt::format("{} chunks", refs.records.size()));
    for (const auto& [tag, regions] : tags) {
      uint64_t sum = 0;
      Json inner = node(tag, nullptr);
      for (const auto& [region, bytes] : regions) {
        sum += bytes;
        inner["children"].push_back(node(region, size_text(bytes)));
      }
      inner["detail"] = size_text(sum);
      entry["children"].push_back(std::move(inner));
    }
    root["children"].push_back(std::move(entry));
  }
  Json requests = node("requests", fmt::format("{}", engine.state.scheduler.requests.size()));
  root["problems"] = Json::array();
  for (const RequestState& request : engine.state.scheduler.requests) {
    const Result<std::vector<ForkStep>> forks = fork_ancestry(request);
    std::string detail = fmt::format("{}, {} + {} tokens", name(request.status), request.prompt_token_ids.size(),
                                     request.output_token_ids.size());
    if (forks && !forks->empty())
      detail += fmt::format(", forked from {} at output token {}", forks->back().request, forks->back().at);
    Json entry = node(request.id, std::move(detail));
    if (!forks) {
      root["problems"].push_back(cli::to_json(forks.error()));
      entry["children"].push_back(node(fmt::format("{}:", name(forks.error().code)), forks.error().what));
    }
    for (size_t group = 0; group < engine.state.kv.groups.size(); ++group) {
      for (const KvTable& table : engine.state.kv.groups[group].tables) {
        if (table.request == request.id)
          entry["children"].push_back(
              node(fmt::format("group {}", group), fmt::format("blocks {}", fmt::join(table.blocks, " "))));
      }
    }
    requests["children"].push_back(std::move(entry));
  }
  root["children"].push_back(std::move(requests));
  return root;
}

void show_node(const Json& node, const std::string& indent, std::string& text) {
  for (size_t i = 0; i < node["children"].size(); ++i) {
    const Json& child = node["children"][i];
    const bool last = i + 1 == node["children"].size();
    text += fmt::format("{}{}{}  {}\n", indent, last ? "└─ " : "├─ ", cell(child["name"]), cell(child["detail"]));
    show_node(child, indent + (last ? "   " : "│  "), text);
  }
}

std::string show_tree(const Json& json) {
  if (json.contains("images")) return show_tree_of_images(json);
  std::string text = fmt::format("{}  {}\n", cell(json["name"]), cell(json["detail"]));
  show_node(json, "", text);
  return text;
}

Json usage_of(const Checkpoint& checkpoint) {
  RecordSums all;
  uint64_t own = 0;
  uint64_t refs = 0;
  for (const RankSummary& rank : checkpoint.manifest().ranks) {
    own += rank.own_bytes();
    refs += rank.refs_bytes;
    for (const auto& [tag, sums] : rank.tags) {
      all.bytes += sums.bytes;
      all.stored_bytes += sums.stored_bytes;
      all.linked_bytes += sums.linked_bytes;
    }
  }
  const uint64_t chunks = all.stored_bytes - all.linked_bytes;
  const uint64_t total = checkpoint.manifest().total_bytes();
  return {{"name", checkpoint.path().substr(checkpoint.path().rfind('/') + 1)},
          {"own_bytes", total},
          {"linked_bytes", checkpoint.manifest().linked_bytes()},
          {"state_bytes", total - own - refs},
          {"refs_bytes", refs},
          {"chunk_bytes", chunks},
          {"padding_bytes", own > chunks ? own - chunks : 0},
          {"in_links_bytes", all.linked_bytes},
          {"memory_bytes", all.bytes}};
}

// One checkpoint, or all of a directory.
Result<Json> du(const Context& context) {
  Json entries = Json::array();
  DiskUsage usage;
  const auto add = [&](const Checkpoint& checkpoint) {
    entries.push_back(usage_of(checkpoint));
    usage.add(checkpoint.manifest(), checkpoint.manifest().total_bytes());
  };
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> directory,
                          context.file_system.open_directory(context.arguments.path, false));
  const bool one = directory->open_file(kManifestFile).has_value();
  if (one) {
    TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                            open_checkpoint(context.file_system, context.arguments.path, context.key));
    add(checkpoint);
  } else {
    TORPOR_ASSIGN_OR_RETURN(const auto manager,
                            CheckpointManager::open(context.file_system, context.arguments.path, {.key = context.key}));
    TORPOR_ASSIGN_OR_RETURN(const std::vector<CheckpointInfo> found, manager->list());
    for (const CheckpointInfo& info : found) {
      if (!info.readable) {
        entries.push_back({{"name", info.name}, {"problem", to_json(info.problem)}});
        continue;
      }
      TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                              open_checkpoint(context.file_system, info.path, context.key));
      add(checkpoint);
    }
  }
  return Json{{"path", context.arguments.path}, {"total_bytes", usage.bytes()}, {"checkpoints", std::move(entries)}};
}

std::string show_du(const Json& json) {
  std::vector<Row> rows = {{"NAME", "OWN", "LINKED", "STATE", "REFS", "CHUNKS", "PADDING", "IN LINKS", "MEMORY"}};
  for (const Json& entry : json["checkpoints"]) {
    if (entry.contains("problem")) {
      rows.push_back({cell(entry["name"]), bad(cell(entry["problem"]["code"]))});
    } else {
      rows.push_back({cell(entry["name"]), size_text(entry["own_bytes"]), size_text(entry["linked_bytes"]),
                      size_text(entry["state_bytes"]), size_text(entry["refs_bytes"]), size_text(entry["chunk_bytes"]),
                      size_text(entry["padding_bytes"]), size_text(entry["in_links_bytes"]),
                      size_text(entry["memory_bytes"])});
    }
  }
  rows.push_back({"total", size_text(json["total_bytes"])});
  return table(rows);
}

}  // namespace

Verb ls_verb() {
  return {.name = "ls",
          .help = "the checkpoints of a directory, oldest first, damaged ones with their problem",
          .json =
              "directory, checkpoints: [{name, path, readable, woken, generation, created, creator, format_version, "
              "protection, owner, id, bytes, linked_bytes, ranks, metadata | problem}]; of a URL: url, checkpoints: "
              "[{name, "
              "readable, generation, created, creator, id, bytes, metadata or metadata_problem | problem}]",
          .declare =
              [](CLI::App& app, Arguments& a) {
                app.add_option("directory", a.path, "a directory of checkpoints, or the URL of an object store")
                    ->required();
              },
          .ask = ls,
          .show = show_ls};
}
Verb info_verb() {
  return {.name = "info",
          .help = "what a checkpoint holds and what an engine needs to wake it",
          .json =
              "path, (as ls), requests: {running, waiting, held, tokens, prompt_tokens, output_tokens}, kv: "
              "{num_blocks, kept_blocks, prefix_entries}, sections, memory, metadata, fingerprint",
          .declare = declare_path,
          .ask = info,
          .show = show_info};
}
Verb tree_verb() {
  return {
      .name = "tree",
      .help =
          "of a checkpoint: sections, tags with their regions, requests with their blocks; of an image of "
          "hibernated requests, or of DIRECTORY/images: requests, who was forked from whom, bytes, digests",
      .json =
          "name, detail, children: [the same], problems; of images path, bytes_by_tier, images: [{id, path, readable, "
          "created, creator, ranks, tier, bytes, state_bytes, kv_bytes, kv_stored_bytes, digests, problems, "
          "foreign, requests: [{id, status, ended, prompt_tokens, output_tokens, computed_tokens, seed, blocks, "
          "shared_blocks, bytes, digests, forked: [{request, at}]}]}], forks: [{request, at, image, seed, children: "
          "[the same]}], foreign, leftovers",
      .declare =
          [](CLI::App& app, Arguments& a) {
            declare_path(app, a);
            app.add_flag("--quick", a.quick, "of images: do not read the KV to check its digests");
            app.add_option("--threads", a.threads, "of images: that read and hash")->check(CLI::Range(0, 256));
          },
      .ask = tree,
      .show = show_tree,
      .exit = exit_of_tree};
}
Verb du_verb() {
  return {.name = "du",
          .help = "who uses the space of a checkpoint, or of all in a directory",
          .json =
              "path, total_bytes (a file with several links counts once), checkpoints: [{name, own_bytes, "
              "linked_bytes, state_bytes, refs_bytes, chunk_bytes, padding_bytes, in_links_bytes, memory_bytes | "
              "problem}]",
          .declare = declare_path,
          .ask = du,
          .show = show_du};
}

}  // namespace torpor::cli
