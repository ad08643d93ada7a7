// SPDX-License-Identifier: Apache-2.0
// Block numbers: a saved state in an engine with another number of KV blocks than the one that saved it.
//
// Blocks that requests hold always come along. Cached ones that no request has come along as far as there is room, the
// last to be evicted first. A block keeps its number where the engine has that number.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "scheduler_state/kv_snapshot.h"

namespace torpor {

struct BlockNumbers {
  int32_t num_blocks = 0;        // that the engine has
  std::vector<int32_t> now;      // of each saved number, the one here; -1: what it has does not come along
  std::vector<int32_t> dropped;  // cached blocks without room, by saved number
};

// The fewest blocks that an engine needs for the requests of this state, the null block included.
int32_t fewest_blocks(const KvSnapshot& saved);

// kIncompatible: the requests hold more blocks than that; names the number that would do. Precondition:
// saved.validate().
Result<BlockNumbers> plan_block_numbers(const KvSnapshot& saved, int32_t num_blocks);

// Gives the blocks these numbers, and notes them in `block_numbers` where one has another number than before. What
// comes along keeps its place in the order of eviction; blocks that only this engine has are taken first.
// Precondition: plan_block_numbers() of the same snapshot. The result is valid().
void renumber(KvSnapshot& snapshot, const BlockNumbers& numbers);

}  // namespace torpor
