#include "checkpoint/engine_checkpoint.h"

#include <algorithm>
#include <set>
#include <unordered_map>

#include "checkpoint/archived_values.h"
#include "checkpoint/journal.h"
#include "checkpoint/section_reader.h"

namespace torpor {
namespace {

constexpr uint32_t kSectionVersion = 2;

// A section is its version, then its values in order.
template <class... Values>
Section pack(std::string name, const Values&... values) {
  return {std::move(name), to_bytes_after(0, kSectionVersion, values...)};
}

Error contradiction(std::string what) {
  return Error{.code = Code::kCorruption, .what = std::move(what), .next_step = "use another checkpoint"};
}

}  // namespace

Status compare_fingerprints(const Fingerprint& checkpoint, const Fingerprint& engine) {
  std::string differences;
  const auto differs = [&](const std::string& field, std::string_view theirs, std::string_view ours) {
    differences += fmt::format("{}{}: checkpoint has {}, this engine has {}", differences.empty() ? "" : "; ", field,
                               theirs, ours);
  };
  for (const auto& [field, value] : checkpoint) {
    const auto found = engine.find(field);
    if (found == engine.end()) {
      differs(field, value, "nothing");
    } else if (found->second != value) {
      differs(field, value, found->second);
    }
  }
  for (const auto& [field, value] : engine) {
    if (!checkpoint.contains(field)) differs(field, "nothing", value);
  }
  if (differences.empty()) return ok();
  return Error{.code = Code::kIncompatible,
               .what = std::move(differences),
               .next_step = "start the engine as the one that slept was started"};
}

Status SchedulerCheckpoint::validate() const {
  TORPOR_TRY(scheduler.validate());
  TORPOR_TRY(kv.validate());
  std::unordered_map<std::string_view, const RequestState*> known;  // finished ones have no state any more
  for (const RequestState& request : scheduler.requests) known.emplace(request.id, &request);
  for (const KvGroup& group : kv.groups) {
    std::set<std::string_view> with_table;
    for (const KvTable& table : group.tables) {
      with_table.insert(table.request);
      const auto found = known.find(table.request);
      if (found == known.end())
        return contradiction(fmt::format("a block table belongs to {}, which is not a request", table.request));
      const RequestState* request = found->second;
      if (request->num_computed_tokens > static_cast<int64_t>(table.blocks.size()) * group.block_size) {
        return contradiction(fmt::format("request {} has {} computed tokens in {} blocks of {}", request->id,
                                         request->num_computed_tokens, table.blocks.size(), group.block_size));
      }
    }
    for (const RequestState& request : scheduler.requests) {
      if (request.num_computed_tokens > 0 && !with_table.contains(request.id)) {
        return contradiction(fmt::format("request {} has computed tokens but no blocks", request.id));
      }
    }
  }
  for (const std::string& id : scheduler.finished) known.emplace(id, nullptr);
  for (size_t i = 0; i < workers.size(); ++i) {
    if (workers[i].rank != static_cast<int32_t>(i))
      return contradiction(fmt::format("worker {} says it is rank {}", i, workers[i].rank));
    std::set<std::string_view> rows;
    for (const std::string& row : workers[i].rows) {
      if (!known.contains(row))
        return contradiction(fmt::format("rank {}: a row belongs to {}, which is not a request", i, row));
      if (!rows.insert(row).second) return contradiction(fmt::format("rank {}: request {} has two rows", i, row));
    }
  }
  return ok();
}

std::vector<Section> encode(const EngineCheckpoint& checkpoint) {
  const SchedulerSnapshot& scheduler = checkpoint.state.scheduler;
  const KvSnapshot& kv = checkpoint.state.kv;
  std::vector<Section> sections;
  sections.push_back(pack("requests", scheduler.requests));
  sections.push_back(
      pack("queues", scheduler.policy, scheduler.running, scheduler.waiting, scheduler.held, scheduler.finished));
  sections.push_back(pack("block_tables", kv.groups));
  sections.push_back(pack("blocks", kv.num_blocks, kv.null_block, kv.blocks));
  sections.push_back(pack("free_order", kv.free_order));
  sections.push_back(pack("prefix_index", kv.prefix_index, kv.extra_hashes));
  sections.push_back(pack("samplers", checkpoint.state.workers));
  sections.push_back(pack("engine", scheduler.engine, kv.engine));
  sections.push_back(pack("outputs", checkpoint.outputs));
  sections.insert(sections.end(), checkpoint.carried.begin(), checkpoint.carried.end());
  return sections;
}

Result<EngineCheckpoint> decode(std::span<const Section> sections) {
  EngineCheckpoint checkpoint;
  SchedulerSnapshot& scheduler = checkpoint.state.scheduler;
  KvSnapshot& kv = checkpoint.state.kv;
  SectionReader reader(sections, kSectionVersion);
  TORPOR_TRY(reader.take("requests", scheduler.requests));
  TORPOR_TRY(reader.take("queues", scheduler.policy, scheduler.running, scheduler.waiting, scheduler.held,
                         scheduler.finished));
  TORPOR_TRY(reader.take("block_tables", kv.groups));
  TORPOR_TRY(reader.take("blocks", kv.num_blocks, kv.null_block, kv.blocks));
  TORPOR_TRY(reader.take("free_order", kv.free_order));
  TORPOR_TRY(reader.take("prefix_index", kv.prefix_index, kv.extra_hashes));
  TORPOR_TRY(reader.take("samplers", checkpoint.state.workers));
  TORPOR_TRY(reader.take("engine", scheduler.engine, kv.engine));
  TORPOR_TRY(reader.take("outputs", checkpoint.outputs));
  for (const Section& section : sections) {
    if (reader.taken(section.name)) continue;
    if (section.name == kJournalSection) {
      TORPOR_TRY(replay_journal(std::as_bytes(std::span(section.bytes)), checkpoint.state));
    } else if (section.required) {
      return Error{.code = Code::kIncompatible,
                   .what = fmt::format("section {}: this torpor does not know it, and it is needed", section.name),
                   .next_step = "use the version of torpor that wrote it, or a newer one"};
    } else {
      checkpoint.carried.push_back(section);
    }
  }
  return checkpoint;
}

}  // namespace torpor
