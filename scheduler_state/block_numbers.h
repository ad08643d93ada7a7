// SPDX-License-Identifier: Apache-2.0
// Block numbers: fits a saved state into an engine that has another number of KV blocks.
//
// Blocks that requests hold are always taken over. Cached blocks of no request are taken over while the engine has
// blocks for them, those that would be evicted last first. A block keeps its number if the engine has that number.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "scheduler_state/kv_snapshot.h"

namespace torpor {

struct BlockNumbers {
  int32_t num_blocks = 0;           // blocks of the engine
  std::vector<int32_t> new_number;  // of each saved number; -1: its content is not taken over
  std::vector<int32_t> dropped;     // cached blocks that do not fit, by saved number
};

// Return the least number of blocks that an engine needs for the requests of this state, including the null block.
int32_t fewest_blocks(const KvSnapshot& saved);

// Decide which saved block gets which number. kIncompatible: the requests hold more than `num_blocks` blocks; the error
// says how many blocks suffice. Precondition: saved.validate().
Result<BlockNumbers> plan_block_numbers(const KvSnapshot& saved, int32_t num_blocks);

// Give the blocks these numbers; if any number changes, record all in `block_numbers`. Blocks that are taken over keep
// their order of eviction; blocks that only this engine has are used before them. Precondition: `numbers` is
// plan_block_numbers() of this snapshot. validate() then succeeds.
void renumber(KvSnapshot& snapshot, const BlockNumbers& numbers);

}  // namespace torpor
