#include "checkpoint/engine_checkpoint.h"

#include <algorithm>
#include <set>
#include <unordered_map>

#include "checkpoint/archived_values.h"

namespace torpor {
namespace {

constexpr uint32_t kSectionVersion = 1;

// A section is its version, then its values in order.
template <class... Values>
Bytes pack(const Values&... values) {
  Bytes bytes;
  BoundedOutput archive(bytes);
  archive(kSectionVersion, values...);
  return bytes;
}

template <class... Values>
Status unpack(std::span<const Section> sections, std::string_view name, Values&... values) {
  const auto wrong = [name](std::string_view what, Code code = Code::kCorruption) {
    return Error{.code = code, .what = fmt::format("section {}: {}", name, what), .next_step = "use another checkpoint"};
  };
  const auto found = std::find_if(sections.begin(), sections.end(), [&](const Section& section) { return section.name == name; });
  if (found == sections.end()) return wrong("it is missing");
  try {
    BoundedInput archive(std::as_bytes(std::span(found->bytes)));
    uint32_t version = 0;
    archive(version);
    if (version != kSectionVersion) return wrong(fmt::format("its version is {}, this torpor reads {}", version, kSectionVersion), Code::kIncompatible);
    archive(values...);
    if (archive.left() != 0) return wrong(fmt::format("{} bytes are left over", archive.left()));
  } catch (const std::exception& problem) {  // cereal's, and bad_alloc
    return wrong(problem.what());
  }
  return ok();
}

Error contradiction(std::string what) {
  return Error{.code = Code::kCorruption, .what = std::move(what), .next_step = "use another checkpoint"};
}

}  // namespace

Status compare_fingerprints(const Fingerprint& checkpoint, const Fingerprint& engine) {
  std::string differences;
  const auto differs = [&](const std::string& field, std::string_view theirs, std::string_view ours) {
    differences += fmt::format("{}{}: checkpoint has {}, this engine has {}", differences.empty() ? "" : "; ", field, theirs, ours);
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
  return Error{.code = Code::kIncompatible, .what = std::move(differences), .next_step = "start the engine as the one that slept was started"};
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
      if (found == known.end()) return contradiction(fmt::format("a block table belongs to {}, which is not a request", table.request));
      const RequestState* request = found->second;
      if (request->num_computed_tokens > static_cast<int64_t>(table.blocks.size()) * group.block_size) {
        return contradiction(fmt::format("request {} has {} computed tokens in {} blocks of {}", request->id, request->num_computed_tokens,
                                         table.blocks.size(), group.block_size));
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
    if (workers[i].rank != static_cast<int32_t>(i)) return contradiction(fmt::format("worker {} says it is rank {}", i, workers[i].rank));
    std::set<std::string_view> rows;
    for (const std::string& row : workers[i].rows) {
      if (!known.contains(row)) return contradiction(fmt::format("rank {}: a row belongs to {}, which is not a request", i, row));
      if (!rows.insert(row).second) return contradiction(fmt::format("rank {}: request {} has two rows", i, row));
    }
  }
  return ok();
}

std::vector<Section> encode(const EngineCheckpoint& checkpoint) {
  const SchedulerSnapshot& scheduler = checkpoint.state.scheduler;
  const KvSnapshot& kv = checkpoint.state.kv;
  std::vector<Section> sections;
  sections.push_back({"fingerprint", pack(checkpoint.fingerprint)});
  sections.push_back({"requests", pack(scheduler.requests)});
  sections.push_back({"queues", pack(scheduler.policy, scheduler.running, scheduler.waiting, scheduler.held, scheduler.finished, scheduler.engine)});
  sections.push_back({"blocks", pack(kv.num_blocks, kv.null_block, kv.groups, kv.blocks, kv.free_order, kv.engine)});
  sections.push_back({"prefix_index", pack(kv.prefix_index, kv.extra_hashes)});
  sections.push_back({"workers", pack(checkpoint.state.workers)});
  sections.push_back({"outputs", pack(checkpoint.outputs)});
  return sections;
}

Result<EngineCheckpoint> decode(std::span<const Section> sections) {
  EngineCheckpoint checkpoint;
  SchedulerSnapshot& scheduler = checkpoint.state.scheduler;
  KvSnapshot& kv = checkpoint.state.kv;
  TORPOR_TRY(unpack(sections, "fingerprint", checkpoint.fingerprint));
  TORPOR_TRY(unpack(sections, "requests", scheduler.requests));
  TORPOR_TRY(unpack(sections, "queues", scheduler.policy, scheduler.running, scheduler.waiting, scheduler.held, scheduler.finished, scheduler.engine));
  TORPOR_TRY(unpack(sections, "blocks", kv.num_blocks, kv.null_block, kv.groups, kv.blocks, kv.free_order, kv.engine));
  TORPOR_TRY(unpack(sections, "prefix_index", kv.prefix_index, kv.extra_hashes));
  TORPOR_TRY(unpack(sections, "workers", checkpoint.state.workers));
  TORPOR_TRY(unpack(sections, "outputs", checkpoint.outputs));
  return checkpoint;
}

}  // namespace torpor
