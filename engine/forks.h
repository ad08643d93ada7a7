// SPDX-License-Identifier: Apache-2.0
// A fork: children of a live request share its full KV blocks, and each has a copy of the one that it goes on in.
//
// Owner: none, these are functions. Threads: the engine core's. Failure: an error changes nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/engine_hooks.h"

namespace torpor {

struct ForkedRequest {
  int64_t prompt_tokens = 0;
  int64_t output_tokens = 0;
  int64_t computed_tokens = 0;    // from the start: those that have KV
  std::vector<int32_t> blocks{};  // in token order
  int32_t block_tokens = 0;       // of one block
};

// The share of each child. Its first tokens are all of the parent's prompt and `output_tokens` of its answer.
struct ForkPlan {
  int64_t output_tokens = 0;
  int64_t computed_tokens = 0;            // that have KV from the start; of a child, the last token never has
  int64_t shared_blocks = 0;              // the first blocks of the parent
  int64_t own_blocks = 0;                 // behind them: for all tokens that it has, so that it can take its first step
  std::optional<int32_t> copied_block{};  // of the parent; it goes into the first of its own
};

// Plan a fork into `children` requests. `at`: output tokens that they share with the parent; none: all. `free_blocks`:
// that nobody uses. kInvalidArgument: the parent has fewer output tokens, or no child is wanted. kResourceExhausted:
// more blocks are needed. kCorruption: values that contradict each other.
Result<ForkPlan> plan_fork(const ForkedRequest& parent, std::optional<int64_t> at, int64_t children,
                           int64_t free_blocks);

// Have every rank copy block `from` into each of `to`, within its device. Return the bytes, of all ranks. The engine
// stands still, and nobody uses the targets; after an error their content is void.
Result<uint64_t> copy_blocks(EngineHooks& hooks, int32_t from, const std::vector<int32_t>& to);

}  // namespace torpor
