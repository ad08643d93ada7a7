// ls, info, tree, du: what checkpoints there are and what is in them.
#include <map>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "checkpoint/checkpoint_manager.h"
#include "checkpoint/store_names.h"
#include "tools/torpor/text.h"

namespace torpor::cli {
namespace {

struct Amount {
  uint64_t chunks = 0;
  uint64_t bytes = 0;
  uint64_t stored_bytes = 0;
  uint64_t earlier_bytes = 0;  // of stored_bytes, in earlier checkpoints
};

std::map<std::string, Amount> amounts_by_tag(const RankChunks& rank) {
  std::map<std::string, Amount> amounts;
  for (const SavedChunk& chunk : rank.chunks) {
    Amount& amount = amounts[chunk.key.tag];
    amount.chunks += 1;
    amount.bytes += chunk.bytes;
    amount.stored_bytes += chunk.stored_bytes;
    amount.earlier_bytes += chunk.file == 0 ? 0 : chunk.stored_bytes;
  }
  return amounts;
}

Json summary(const Manifest& manifest, uint64_t bytes, size_t ranks) {
  return {{"generation", manifest.generation},
          {"created", time_text(manifest.created_unix_seconds)},
          {"creator", manifest.creator},
          {"format_version", manifest.format_version},
          {"protection", name(manifest.protection)},
          {"id", hex(manifest.id)},
          {"bytes", bytes},
          {"ranks", ranks}};
}

Json memory_of(const Manifest& manifest) {
  Json memory = Json::array();
  for (const RankChunks& rank : manifest.ranks) {
    for (const auto& [tag, amount] : amounts_by_tag(rank)) {
      memory.push_back({{"rank", rank.rank},
                        {"tag", tag},
                        {"chunks", amount.chunks},
                        {"bytes", amount.bytes},
                        {"stored_bytes", amount.stored_bytes},
                        {"in_earlier_bytes", amount.earlier_bytes}});
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

Json names_of(const std::vector<uint64_t>& generations) {
  Json names = Json::array();
  for (const uint64_t generation : generations) names.push_back(generation_name(generation));
  return names;
}

Result<Json> ls(const Context& context) {
  TORPOR_ASSIGN(const auto manager,
                CheckpointManager::open(context.file_system, context.arguments.path, {.key = context.key}));
  TORPOR_ASSIGN(const std::vector<CheckpointInfo> found, manager->list());
  Json checkpoints = Json::array();
  for (const CheckpointInfo& checkpoint : found) {
    Json entry = {{"name", checkpoint.name},
                  {"path", checkpoint.path},
                  {"readable", checkpoint.readable},
                  {"woken", checkpoint.woken}};
    if (checkpoint.readable) {
      entry.update(summary(checkpoint.manifest, checkpoint.bytes, checkpoint.ranks));
      entry["needs"] = names_of(checkpoint.needs);
    } else {
      entry["problem"] = to_json(checkpoint.problem);
    }
    checkpoints.push_back(std::move(entry));
  }
  return Json{{"directory", context.arguments.path}, {"checkpoints", std::move(checkpoints)}};
}

std::string show_ls(const Json& json) {
  if (json["checkpoints"].empty()) return fmt::format("no checkpoints in {}\n", cell(json["directory"]));
  std::vector<Row> rows = {{"NAME", "CREATED", "SIZE", "RANKS", "SEAL", "WOKEN", "NEEDS", "CREATOR"}};
  for (const Json& entry : json["checkpoints"]) {
    if (entry["readable"]) {
      rows.push_back({cell(entry["name"]), cell(entry["created"]), size_text(entry["bytes"]), cell(entry["ranks"]),
                      cell(entry["protection"]), entry["woken"] ? "yes" : "no",
                      entry["needs"].empty()
                          ? "-"
                          : fmt::format("{}", fmt::join(entry["needs"].get<std::vector<std::string>>(), ",")),
                      cell(entry["creator"])});
    } else {
      rows.push_back({cell(entry["name"]), bad(fmt::format("{}:", cell(entry["problem"]["code"]))),
                      cell(entry["problem"]["what"])});
    }
  }
  return table(rows);
}

Result<Json> info(const Context& context) {
  TORPOR_ASSIGN(const Checkpoint checkpoint, open_checkpoint(context.file_system, context.arguments.path, context.key));
  TORPOR_ASSIGN(const EngineCheckpoint engine, checkpoint.read_state());
  const SchedulerSnapshot& scheduler = engine.state.scheduler;
  const KvSnapshot& kv = engine.state.kv;
  size_t prompt = 0;
  size_t output = 0;
  for (const RequestState& request : scheduler.requests) {
    prompt += request.prompt_token_ids.size();
    output += request.output_token_ids.size();
  }
  Json json = {{"path", checkpoint.path()}};
  json.update(summary(checkpoint.manifest(), checkpoint.manifest().total_bytes(), checkpoint.manifest().ranks.size()));
  json["needs"] = names_of(checkpoint.manifest().needs());
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
  json["fingerprint"] = engine.fingerprint;
  return json;
}

std::string show_info(const Json& json) {
  std::string text = fmt::format("{}\n  created {} by {}, format {}, seal: {}, {}\n", cell(json["path"]),
                                 cell(json["created"]), cell(json["creator"]), cell(json["format_version"]),
                                 cell(json["protection"]), size_text(json["bytes"]));
  if (!json["needs"].empty())
    text += fmt::format("  needs {} of the same directory\n",
                        fmt::join(json["needs"].get<std::vector<std::string>>(), ", "));
  const Json& requests = json["requests"];
  text += fmt::format("  {} requests running, {} waiting, {} held; {} prompt and {} output tokens\n",
                      cell(requests["running"]), cell(requests["waiting"]), cell(requests["held"]),
                      cell(requests["prompt_tokens"]), cell(requests["output_tokens"]));
  text += fmt::format("  {} of {} KV blocks kept, {} entries in the prefix index\n", cell(json["kv"]["kept_blocks"]),
                      cell(json["kv"]["num_blocks"]), cell(json["kv"]["prefix_entries"]));
  std::vector<Row> memory = {{"RANK", "TAG", "CHUNKS", "BYTES", "STORED", "IN EARLIER ONES"}};
  for (const Json& entry : json["memory"]) {
    memory.push_back({cell(entry["rank"]), cell(entry["tag"]), cell(entry["chunks"]), size_text(entry["bytes"]),
                      size_text(entry["stored_bytes"]), size_text(entry["in_earlier_bytes"])});
  }
  std::vector<Row> sections = {{"SECTION", "BYTES", "STORED"}};
  for (const Json& entry : json["sections"])
    sections.push_back({cell(entry["name"]), size_text(entry["bytes"]), size_text(entry["stored_bytes"])});
  std::vector<Row> fields = {{"MUST BE EQUAL", "VALUE"}};
  for (const auto& [name, value] : json["fingerprint"].items()) fields.push_back({harmless(name), cell(value)});
  return text + '\n' + table(memory) + '\n' + table(sections) + '\n' + table(fields) +
         "\nnext: torpor fits, torpor requests, torpor verify\n";
}

// {"name", "bytes", "children"}: tags > regions, requests > blocks.
Result<Json> tree(const Context& context) {
  TORPOR_ASSIGN(const Checkpoint checkpoint, open_checkpoint(context.file_system, context.arguments.path, context.key));
  TORPOR_ASSIGN(const EngineCheckpoint engine, checkpoint.read_state());
  const auto node = [](std::string name, Json detail) {
    return Json{{"name", std::move(name)}, {"detail", std::move(detail)}, {"children", Json::array()}};
  };
  Json root = node(checkpoint.path(), size_text(checkpoint.manifest().total_bytes()));
  Json state = node("STATE", fmt::format("{} sections", checkpoint.manifest().sections.size()));
  for (const SectionInfo& section : checkpoint.manifest().sections)
    state["children"].push_back(node(section.name, size_text(section.bytes)));
  root["children"].push_back(std::move(state));
  for (const RankChunks& rank : checkpoint.manifest().ranks) {
    std::map<std::string, std::map<std::string, uint64_t>> tags;
    for (const SavedChunk& chunk : rank.chunks)
      tags[chunk.key.tag][chunk.key.kind == ChunkKind::kKvBlock ? "KV blocks" : chunk.key.region] += chunk.bytes;
    Json entry = node(fmt::format("rank {}", rank.rank), fmt::format("{} chunks", rank.chunks.size()));
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
  for (const RequestState& request : engine.state.scheduler.requests) {
    Json entry = node(request.id, fmt::format("{}, {} + {} tokens", name(request.status),
                                              request.prompt_token_ids.size(), request.output_token_ids.size()));
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
  std::string text = fmt::format("{}  {}\n", cell(json["name"]), cell(json["detail"]));
  show_node(json, "", text);
  return text;
}

Json usage_of(const Checkpoint& checkpoint) {
  uint64_t chunks = 0;
  uint64_t plain = 0;
  uint64_t earlier = 0;
  uint64_t padding = 0;
  for (const RankChunks& rank : checkpoint.manifest().ranks) {
    uint64_t used = 0;
    for (const SavedChunk& chunk : rank.chunks) {
      plain += chunk.bytes;
      (chunk.file == 0 ? used : earlier) += chunk.stored_bytes;
    }
    chunks += used;
    padding += rank.files[0].bytes > used ? rank.files[0].bytes - used : 0;
  }
  uint64_t sections = 0;
  for (const SectionInfo& section : checkpoint.manifest().sections) sections += section.stored_bytes;
  return {{"name", checkpoint.path().substr(checkpoint.path().rfind('/') + 1)},
          {"own_bytes", checkpoint.manifest().total_bytes()},
          {"state_bytes", sections},
          {"chunk_bytes", chunks},
          {"padding_bytes", padding},
          {"in_earlier_bytes", earlier},
          {"memory_bytes", plain},
          {"needs", names_of(checkpoint.manifest().needs())}};
}

// One checkpoint, or all of a directory.
Result<Json> du(const Context& context) {
  Json entries = Json::array();
  uint64_t total = 0;
  TORPOR_ASSIGN(const std::unique_ptr<Directory> directory,
                context.file_system.open_directory(context.arguments.path, false));
  const bool one = directory->open_file(kManifestFile).has_value();
  if (one) {
    TORPOR_ASSIGN(const Checkpoint checkpoint,
                  open_checkpoint(context.file_system, context.arguments.path, context.key));
    entries.push_back(usage_of(checkpoint));
  } else {
    TORPOR_ASSIGN(const auto manager,
                  CheckpointManager::open(context.file_system, context.arguments.path, {.key = context.key}));
    TORPOR_ASSIGN(const std::vector<CheckpointInfo> found, manager->list());
    for (const CheckpointInfo& info : found) {
      if (!info.readable) {
        entries.push_back({{"name", info.name}, {"problem", to_json(info.problem)}});
        continue;
      }
      TORPOR_ASSIGN(const Checkpoint checkpoint, manager->open_generation(info.manifest.generation));
      entries.push_back(usage_of(checkpoint));
    }
  }
  for (const Json& entry : entries) total += entry.value("own_bytes", uint64_t{0});
  return Json{{"path", context.arguments.path}, {"total_bytes", total}, {"checkpoints", std::move(entries)}};
}

std::string show_du(const Json& json) {
  std::vector<Row> rows = {{"NAME", "ON DISK", "STATE", "CHUNKS", "PADDING", "IN EARLIER ONES", "MEMORY"}};
  for (const Json& entry : json["checkpoints"]) {
    if (entry.contains("problem")) {
      rows.push_back({cell(entry["name"]), bad(cell(entry["problem"]["code"]))});
    } else {
      rows.push_back({cell(entry["name"]), size_text(entry["own_bytes"]), size_text(entry["state_bytes"]),
                      size_text(entry["chunk_bytes"]), size_text(entry["padding_bytes"]),
                      size_text(entry["in_earlier_bytes"]), size_text(entry["memory_bytes"])});
    }
  }
  rows.push_back({"total", size_text(json["total_bytes"])});
  return table(rows);
}

}  // namespace

Verb ls_verb() {
  return {
      .name = "ls",
      .help = "the checkpoints of a directory, oldest first, damaged ones with their problem",
      .json =
          "directory, checkpoints: [{name, path, readable, woken, generation, created, creator, format_version, "
          "protection, id, bytes, ranks, needs | problem}]",
      .declare = [](CLI::App& app,
                    Arguments& a) { app.add_option("directory", a.path, "a directory of checkpoints")->required(); },
      .ask = ls,
      .show = show_ls};
}
Verb info_verb() {
  return {.name = "info",
          .help = "what a checkpoint holds and what an engine needs to wake it",
          .json =
              "path, (as ls), requests: {running, waiting, held, tokens, prompt_tokens, output_tokens}, kv: "
              "{num_blocks, kept_blocks, prefix_entries}, sections, memory, fingerprint",
          .declare = declare_path,
          .ask = info,
          .show = show_info};
}
Verb tree_verb() {
  return {.name = "tree",
          .help = "sections, tags with their regions, requests with their blocks",
          .json = "name, detail, children: [the same]",
          .declare = declare_path,
          .ask = tree,
          .show = show_tree};
}
Verb du_verb() {
  return {.name = "du",
          .help = "who uses the space of a checkpoint, or of all in a directory",
          .json =
              "path, total_bytes, checkpoints: [{name, own_bytes, state_bytes, chunk_bytes, padding_bytes, "
              "in_earlier_bytes, memory_bytes, needs | problem}]",
          .declare = declare_path,
          .ask = du,
          .show = show_du};
}

}  // namespace torpor::cli
