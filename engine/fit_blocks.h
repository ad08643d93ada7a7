// SPDX-License-Identifier: Apache-2.0
// fit_blocks(): fits the KV blocks of a checkpoint into the engine that wakes from it, which may have more or fewer.
#pragma once

#include <cstdint>
#include <string>

#include "engine/rank_group.h"
#include "scheduler_state/kv_snapshot.h"

namespace torpor {

struct FittedBlocks {
  int64_t dropped = 0;  // cached blocks that found no place
  std::string note;     // a sentence about them
};

// Give the blocks numbers that the ranks have. kIncompatible: the blocks of the requests do not fit; the error has the
// number of blocks that would do, and how to set it.
Result<FittedBlocks> fit_blocks(KvSnapshot& kv, const Described& described);

}  // namespace torpor
