// SPDX-License-Identifier: Apache-2.0
#include "engine/forks.h"

#include <algorithm>

#include <fmt/core.h>

#include "engine/rank_group.h"

namespace torpor {
namespace {

constexpr int64_t kMostChildren = 1024;  // a larger number is a mistake of the caller

Error invalid(std::string what, std::string next_step) {
  return {.code = Code::kInvalidArgument, .what = std::move(what), .next_step = std::move(next_step)};
}

int64_t blocks_of(int64_t tokens, int32_t block_tokens) { return (tokens + block_tokens - 1) / block_tokens; }

}  // namespace

Result<ForkPlan> plan_fork(const ForkedRequest& parent, std::optional<int64_t> at, int64_t children,
                           int64_t free_blocks) {
  if (children < 1 || children > kMostChildren)
    return invalid(fmt::format("a fork into {} requests", children), fmt::format("give 1 to {}", kMostChildren));
  const int64_t outputs = at.value_or(parent.output_tokens);
  if (outputs < 0 || outputs > parent.output_tokens) {
    return invalid(fmt::format("a fork at output token {}: the request has {}", outputs, parent.output_tokens),
                   "name a place in its answer so far");
  }
  const int64_t tokens = parent.prompt_tokens + parent.output_tokens;
  if (parent.block_tokens < 1 || parent.prompt_tokens < 1 || parent.computed_tokens < 0 ||
      parent.computed_tokens > tokens ||
      static_cast<int64_t>(parent.blocks.size()) < blocks_of(parent.computed_tokens, parent.block_tokens)) {
    return Error{.code = Code::kCorruption,
                 .what = fmt::format("a request of {} tokens has KV of {} in {} blocks of {}", tokens,
                                     parent.computed_tokens, parent.blocks.size(), parent.block_tokens),
                 .next_step = "report this"};
  }
  const int64_t of_child = parent.prompt_tokens + outputs;
  ForkPlan plan{.output_tokens = outputs, .computed_tokens = std::min(parent.computed_tokens, of_child - 1)};
  if (plan.computed_tokens == 0) return plan;  // the scheduler allocates its blocks when its turn comes
  plan.shared_blocks = plan.computed_tokens / parent.block_tokens;
  plan.own_blocks = blocks_of(of_child, parent.block_tokens) - plan.shared_blocks;
  if (plan.computed_tokens % parent.block_tokens != 0)
    plan.copied_block = parent.blocks[static_cast<size_t>(plan.shared_blocks)];
  if (plan.own_blocks * children > free_blocks) {
    return Error{.code = Code::kResourceExhausted,
                 .what = fmt::format("a fork needs {} KV blocks, {} are free", plan.own_blocks * children, free_blocks),
                 .next_step = "fork into fewer requests, or wait until others end"};
  }
  return plan;
}

Result<uint64_t> copy_blocks(EngineHooks& hooks, int32_t from, const std::vector<int32_t>& to) {
  const orders::CopyBlocks order{.from = std::vector<int32_t>(to.size(), from), .to = to};
  TORPOR_ASSIGN_OR_RETURN(const std::vector<orders::CopyBlocks::Reply> replies,
                          try_catch([&] { return RankGroup(hooks).call(order); }));
  return total_bytes(replies);
}

}  // namespace torpor
