// SPDX-License-Identifier: Apache-2.0
// A job of OffloadWorker, from its plan to its report.
#pragma once

#include <memory>
#include <vector>

#include "kvcache/transfer_plan.h"
#include "offload/chunk.h"

namespace torpor {

struct OffloadJob {
  PlannedJob planned;
  std::vector<int32_t> from;
  std::vector<int32_t> to;
  std::vector<ChunkPlan> plans{};
  std::vector<BlockKey> keys{};  // of its blocks, where its stores need them
  Status refused{};
};

}  // namespace torpor
