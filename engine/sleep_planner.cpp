// SPDX-License-Identifier: Apache-2.0
#include "engine/sleep_planner.h"

#include <fmt/core.h>

#include "base/text.h"
#include "engine/engine_fingerprint.h"

namespace torpor {

Error cannot_sleep_to_disk(const std::vector<std::string>& asleep) {
  return {.code = Code::kFailedPrecondition,
          .what = fmt::format("{} asleep already: a checkpoint is made of memory that is there", joined(asleep, ", ")),
          .next_step = "wake it first, or sleep to host"};
}

Status can_sleep_to_disk(const OperationContext& context, bool asleep, bool preserve_state,
                         const std::vector<std::string>& tags, const Described& described) {
  if (!context.asleep.tags.empty()) return cannot_sleep_to_disk(context.asleep.tags);
  TORPOR_RETURN_IF_ERROR(all_have_content(described));
  if (!preserve_state) return ok();
  TORPOR_RETURN_IF_ERROR(has_kv(tags, described));
  // A checkpoint names the weights that its KV comes from.
  if (!asleep || writes_of_weights(described) == context.asleep.weights_writes) return ok();
  TORPOR_ASSIGN_OR_RETURN(const bool same,
                          weights_have_digests(context.engine, described, context.asleep.weights_digests));
  if (same) return ok();
  return Error{.code = Code::kFailedPrecondition,
               .what =
                   "the weights were written since the engine fell asleep, and its KV is of the old ones: a "
                   "checkpoint would take it for KV of the new ones",
               .next_step = "wake the engine first and say what happens to old KV, or sleep to host"};
}

Result<SleepPlan> plan_of_sleep(const OperationContext& context, const SleepOptions& options, const Status& valid,
                                bool being_written) {
  const EngineParts& engine = context.engine;
  SleepPlan plan;
  if (!valid) plan.problems.push_back(valid.error().to_string());
  const EngineState::At at = engine.state.at();
  const bool asleep = at == EngineState::At::kAsleep;
  if (at != EngineState::At::kAwake && !asleep)
    plan.problems.push_back(fmt::format("the engine is {}", engine.state.view().engine));
  if (options.preserve_state) {
    TORPOR_ASSIGN_OR_RETURN(const std::vector<std::string> unsupported, engine.hooks.unsupported());
    for (const std::string& feature : unsupported)
      plan.problems.push_back(fmt::format("cannot be preserved: {}", feature));
  }
  if (!plan.problems.empty()) return plan;
  TORPOR_ASSIGN_OR_RETURN(const Described described, engine.ranks.call(orders::Describe{}));
  TORPOR_ASSIGN_OR_RETURN(std::vector<std::string> tags, select_tags(options.tags, described));
  std::erase_if(tags, [&](const std::string& tag) { return has_tag(context.asleep.tags, tag); });
  if (asleep && (tags.empty() || options.level == 0)) plan.problems.push_back("already asleep");
  TORPOR_ASSIGN_OR_RETURN(plan.requests, engine.hooks.unfinished_requests());
  if (options.to_disk) {
    if (const Status can = can_sleep_to_disk(context, asleep, options.preserve_state, tags, described); !can) {
      plan.problems.push_back(can.error().to_string());
      return plan;
    }
  }
  if (options.level == 0) return plan;
  const std::string directory = context.checkpoints.directory_of(options.data_parallel);
  if (options.to_disk && !asleep && !options.discard_on_save_error && !being_written) {
    const Status seen = context.checkpoints.check_seen_by_all(directory, described.size());
    if (!seen) plan.problems.push_back(seen.error().to_string());
  }
  orders::Save planned{.stage = orders::Save::Stage::kPlan};
  if (options.preserve_state && has_tag(tags, kKvCacheTag)) {
    TORPOR_ASSIGN_OR_RETURN(const CapturedState state, engine.hooks.capture());
    const LiveBlocks live = select_live_blocks(state.kv, block_bytes(described).most, engine.options.kv_budget_bytes);
    plan.kept_blocks = static_cast<int64_t>(live.kept.size());
    plan.dropped_blocks = static_cast<int64_t>(live.dropped.size());
    name_blocks(planned, state, live.kept);
    if (!options.to_disk) {
      TORPOR_ASSIGN_OR_RETURN(planned.host_slots, engine.hooks.host_slots(planned.blocks, /*keep=*/false));
    }
  }
  for (const std::string& tag : tags) {
    plan.free_bytes[tag] = tag_bytes(described, tag, &RankLedger::Tag::physical_bytes);
    if (tag == kKvCacheTag) {
      plan.save_bytes[tag] = static_cast<uint64_t>(plan.kept_blocks) * block_bytes(described).all;
    } else if (!options.drops(tag)) {
      plan.save_bytes[tag] = tag_bytes(described, tag, &RankLedger::Tag::region_bytes);
    }
    if (!options.drops(tag)) planned.tags.push_back(tag);
  }
  for (const auto& [tag, bytes] : plan.save_bytes) (options.to_disk ? plan.disk_bytes : plan.host_bytes) += bytes;
  if (options.to_disk) {
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointManager> checkpoints, context.checkpoints.open(directory));
    planned.writing = checkpoints->next_writing();
    planned.as_proven = !engine.options.always_read_weights;
    if (planned.writing.base.empty()) return plan;
  }
  TORPOR_ASSIGN_OR_RETURN(const std::vector<orders::Save::Reply> replies, engine.ranks.call(planned));
  for (auto& [tag, bytes] : plan.save_bytes) bytes = 0;
  for (const orders::Save::Reply& reply : replies) {
    for (const auto& [tag, bytes] : reply.copied_bytes) plan.save_bytes[tag] += bytes;
    plan.reused_bytes += reply.reused_bytes;
    plan.disk_bytes += reply.spilled_bytes;
  }
  if (!options.to_disk) plan.host_bytes -= plan.disk_bytes;
  return plan;
}

}  // namespace torpor
