// SPDX-License-Identifier: Apache-2.0
// OffloadJob: a job of an OffloadWorker, from its plan to its report.
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
  std::vector<BlockKey> keys{};  // one for each block, if its stores need them
  // The error if the transfer engine did not accept the job.
  Status refused{};
};

}  // namespace torpor
