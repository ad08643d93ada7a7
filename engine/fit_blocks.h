// SPDX-License-Identifier: Apache-2.0
// fit_blocks(): the KV blocks of a checkpoint in the engine that wakes from it, which may have more or fewer.
#pragma once

#include <cstdint>
#include <string>

#include "engine/rank_group.h"
#include "scheduler_state/kv_snapshot.h"

namespace torpor {

struct FittedBlocks {
  int64_t dropped = 0;  // cached blocks that had no room
  std::string note;     // says so
};

// Gives the blocks numbers that the ranks have. kIncompatible, with the number that would do and how to set it: the
// requests do not fit.
Result<FittedBlocks> fit_blocks(KvSnapshot& kv, const Described& described);

}  // namespace torpor
