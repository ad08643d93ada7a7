#include "tools/torpor/inspect.h"

#include <algorithm>
#include <map>

#include <fmt/chrono.h>
#include <fmt/format.h>

#include "checkpoint/checkpoint_manager.h"

namespace torpor::inspect {
namespace {

std::string time_text(double unix_seconds) {
  if (!(unix_seconds >= 0 && unix_seconds < 4e9)) return "unknown";
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(static_cast<std::time_t>(unix_seconds)));
}

struct Amount {
  uint64_t chunks = 0;
  uint64_t bytes = 0;
  uint64_t stored_bytes = 0;
};

std::map<std::string, Amount> amounts_by_tag(const RankChunks& rank) {
  std::map<std::string, Amount> amounts;
  for (const SavedChunk& chunk : rank.chunks) {
    Amount& amount = amounts[chunk.key.tag];
    amount.chunks += 1;
    amount.bytes += chunk.bytes;
    amount.stored_bytes += chunk.stored_bytes;
  }
  return amounts;
}

Json summary(const Manifest& manifest) {
  return {{"generation", manifest.generation},
          {"created", time_text(manifest.created_unix_seconds)},
          {"creator", manifest.creator},
          {"format_version", manifest.format_version},
          {"bytes", manifest.total_bytes()},
          {"ranks", manifest.ranks.size()}};
}

Json sections_of(const Manifest& manifest) {
  Json sections = Json::array();
  for (const SectionInfo& section : manifest.sections) {
    sections.push_back({{"name", section.name}, {"bytes", section.bytes}, {"stored_bytes", section.stored_bytes}});
  }
  return sections;
}

Json memory_of(const Manifest& manifest) {
  Json memory = Json::array();
  for (const RankChunks& rank : manifest.ranks) {
    for (const auto& [tag, amount] : amounts_by_tag(rank)) {
      memory.push_back({{"rank", rank.rank},
                        {"tag", tag},
                        {"chunks", amount.chunks},
                        {"bytes", amount.bytes},
                        {"stored_bytes", amount.stored_bytes}});
    }
  }
  return memory;
}

std::string queue_of(const SchedulerSnapshot& scheduler, const std::string& id) {
  const auto holds = [&](const std::vector<std::string>& queue) { return std::find(queue.begin(), queue.end(), id) != queue.end(); };
  return holds(scheduler.running) ? "running" : holds(scheduler.waiting) ? "waiting" : holds(scheduler.held) ? "held" : "none";
}

size_t blocks_of(const KvSnapshot& kv, const std::string& id) {
  size_t count = 0;
  for (const KvGroup& group : kv.groups) {
    for (const KvTable& table : group.tables) count += table.request == id ? table.blocks.size() : 0;
  }
  return count;
}

Json sampling_of(const SamplingState& sampling) {
  Json json = {{"temperature", sampling.temperature}, {"top_p", sampling.top_p}, {"top_k", sampling.top_k}, {"n", sampling.n}};
  if (sampling.seed) json["seed"] = *sampling.seed;
  if (!sampling.stop.empty()) json["stop"] = sampling.stop;
  if (sampling.logprobs) json["logprobs"] = *sampling.logprobs;
  return json;
}

}  // namespace

Json to_json(const Error& error) { return {{"code", name(error.code)}, {"what", error.what}, {"next_step", error.next_step}}; }

Result<Json> list(FileSystem& file_system, const std::string& directory) {
  TORPOR_ASSIGN(const auto manager, CheckpointManager::open(file_system, directory));
  TORPOR_ASSIGN(const std::vector<CheckpointInfo> found, manager->list());
  Json checkpoints = Json::array();
  for (const CheckpointInfo& checkpoint : found) {
    Json entry = {{"name", checkpoint.name}, {"path", checkpoint.path}, {"readable", checkpoint.readable}};
    if (checkpoint.readable) {
      entry.update(summary(checkpoint.manifest));
    } else {
      entry["problem"] = to_json(checkpoint.problem);
    }
    checkpoints.push_back(std::move(entry));
  }
  return Json{{"directory", directory}, {"checkpoints", std::move(checkpoints)}};
}

Result<Json> info(FileSystem& file_system, const std::string& path) {
  TORPOR_ASSIGN(const Checkpoint checkpoint, open_checkpoint(file_system, path));
  TORPOR_ASSIGN(const EngineCheckpoint engine, checkpoint.read_state());
  const SchedulerSnapshot& scheduler = engine.state.scheduler;
  const KvSnapshot& kv = engine.state.kv;
  int64_t tokens = 0;
  for (const RequestState& request : scheduler.requests) {
    tokens += static_cast<int64_t>(request.prompt_token_ids.size() + request.output_token_ids.size());
  }
  Json json = {{"path", checkpoint.path()}};
  json.update(summary(checkpoint.manifest()));
  json["requests"] = {{"running", scheduler.running.size()},
                      {"waiting", scheduler.waiting.size()},
                      {"held", scheduler.held.size()},
                      {"tokens", tokens}};
  json["kv"] = {{"num_blocks", kv.num_blocks}, {"kept_blocks", kv.blocks.size()}, {"prefix_entries", kv.prefix_index.size()}};
  json["sections"] = sections_of(checkpoint.manifest());
  json["memory"] = memory_of(checkpoint.manifest());
  json["fingerprint"] = engine.fingerprint;
  return json;
}

Result<Json> requests(FileSystem& file_system, const std::string& path) {
  TORPOR_ASSIGN(const Checkpoint checkpoint, open_checkpoint(file_system, path));
  TORPOR_ASSIGN(const EngineCheckpoint engine, checkpoint.read_state());
  Json list = Json::array();
  for (const RequestState& request : engine.state.scheduler.requests) {
    list.push_back({{"id", request.id},
                    {"queue", queue_of(engine.state.scheduler, request.id)},
                    {"status", name(request.status)},
                    {"prompt_tokens", request.prompt_token_ids.size()},
                    {"output_tokens", request.output_token_ids.size()},
                    {"max_tokens", request.max_tokens},
                    {"computed_tokens", request.num_computed_tokens},
                    {"blocks", blocks_of(engine.state.kv, request.id)},
                    {"preemptions", request.num_preemptions},
                    {"priority", request.priority},
                    {"sampling", sampling_of(request.sampling)}});
  }
  return Json{{"path", checkpoint.path()}, {"requests", std::move(list)}};
}

Result<Json> verify(FileSystem& file_system, const std::string& path) {
  Json problems = Json::array();
  std::string name = path;
  Result<Checkpoint> checkpoint = open_checkpoint(file_system, path);
  if (checkpoint) {
    name = checkpoint->path();
    TORPOR_ASSIGN(const std::vector<Error> found, checkpoint->verify());
    for (const Error& error : found) problems.push_back(to_json(error));
  } else if (checkpoint.error().code == Code::kCorruption || checkpoint.error().code == Code::kIncompatible) {
    problems.push_back(to_json(checkpoint.error()));
  } else {
    return checkpoint.error();
  }
  const bool whole = problems.empty();
  return Json{{"path", name}, {"whole", whole}, {"problems", std::move(problems)}};
}

}  // namespace torpor::inspect
