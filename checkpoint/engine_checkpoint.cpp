// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/engine_checkpoint.h"

#include <algorithm>
#include <array>
#include <set>
#include <unordered_map>

#include <fmt/core.h>

namespace torpor {
namespace {

Error contradiction(std::string what) {
  return Error{.code = Code::kCorruption, .what = std::move(what), .next_step = "use another checkpoint"};
}

// Fields that may differ when an engine takes over only requests. They decide how an engine computes and schedules;
// some change how it rounds. But its KV has the same meaning and layout, so another engine can go on with it.
constexpr std::array<std::string_view, 17> kMayDifferForRequests = {
    "chunked_prefill",
    "compilation",
    "cpu_capability",
    "cpu_linear",
    "cuda",
    "kv_num_blocks",
    "max_num_batched_tokens",
    "max_num_seqs",
    "prefix_caching",
    "prefix_hash",
    "prefix_hash_tokens",
    "prefix_retention",
    "scheduling_policy",
    "threads",
    "torch_version",
    "transformers_version",
    "vllm_version",
};

template <class MayDiffer>
Status compare(const Fingerprint& checkpoint, const Fingerprint& engine, const MayDiffer& may_differ) {
  std::string differences;
  const auto differs = [&](const std::string& field, std::string_view theirs, std::string_view ours) {
    differences += fmt::format("{}{}: checkpoint has {}, this engine has {}", differences.empty() ? "" : "; ", field,
                               theirs, ours);
  };
  for (const auto& [field, value] : checkpoint) {
    if (may_differ(field)) continue;
    const auto found = engine.find(field);
    if (found == engine.end()) {
      differs(field, value, "nothing");
    } else if (found->second != value) {
      differs(field, value, found->second);
    }
  }
  for (const auto& [field, value] : engine) {
    if (!may_differ(field) && !checkpoint.contains(field)) differs(field, "nothing", value);
  }
  if (differences.empty()) return ok();
  return Error{.code = Code::kIncompatible,
               .what = std::move(differences),
               .next_step = "start the engine as the one that slept was started"};
}

}  // namespace

Status compare_fingerprints(const Fingerprint& checkpoint, const Fingerprint& engine) {
  return compare(checkpoint, engine, [](const std::string& field) { return field == kNumBlocksField; });
}

Status compare_portable(const Fingerprint& checkpoint, const Fingerprint& engine) {
  // The digest of a model's configuration depends on the release of transformers that read it. If the releases differ,
  // the digest of the weights identifies the model.
  const auto of_transformers = [](const Fingerprint& fields) {
    const auto found = fields.find("transformers_version");
    return found == fields.end() ? std::string() : found->second;
  };
  const bool same_reader = of_transformers(checkpoint) == of_transformers(engine);
  return compare(checkpoint, engine, [&](const std::string& field) {
    if (field == "model_config" && !same_reader) return true;
    return std::find(kMayDifferForRequests.begin(), kMayDifferForRequests.end(), field) != kMayDifferForRequests.end();
  });
}

Status CapturedState::validate() const {
  TORPOR_RETURN_IF_ERROR(scheduler.validate());
  TORPOR_RETURN_IF_ERROR(kv.validate());
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

}  // namespace torpor
