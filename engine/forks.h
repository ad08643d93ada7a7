// SPDX-License-Identifier: Apache-2.0
// A fork: children of a live request share its full KV blocks. Each child has its own copy of the block that is not
// full.
//
// Owner: none, these are functions. Threads: the engine core's. Failure: after an error nothing has changed.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/engine_hooks.h"

namespace torpor {

struct ForkedRequest {
  int64_t prompt_tokens = 0;
  int64_t output_tokens = 0;
  int64_t computed_tokens = 0;    // tokens, from the first on, that have KV
  std::vector<int32_t> blocks{};  // in token order
  int32_t block_tokens = 0;       // tokens of one block
};

// The plan for each child. It begins with the parent's prompt and the parent's first `output_tokens` output tokens.
struct ForkPlan {
  int64_t output_tokens = 0;
  int64_t computed_tokens = 0;  // tokens, from the first on, that have KV; the child computes its last token itself
  int64_t shared_blocks = 0;    // the first blocks of the parent, shared
  int64_t own_blocks = 0;       // blocks of the child's own behind those, enough for its first step
  std::optional<int32_t> copied_block{};  // the parent's block that is copied into the child's first own block
};

// Plan a fork into `children` requests. `at`: number of output tokens that they share with the parent; none: all.
// `free_blocks`: number of blocks that no request uses. kInvalidArgument: the parent has fewer output tokens, or no
// child is wanted. kResourceExhausted: the children need more blocks. kCorruption: values contradict each other.
Result<ForkPlan> plan_fork(const ForkedRequest& parent, std::optional<int64_t> at, int64_t children,
                           int64_t free_blocks);

// Have every rank copy block `from` into each block of `to`, within its device. Return the copied bytes of all ranks.
// Precondition: the engine is stopped, and nothing uses the targets. After an error the content of the targets is
// void.
Result<uint64_t> copy_blocks(EngineHooks& hooks, int32_t from, const std::vector<int32_t>& to);

}  // namespace torpor
