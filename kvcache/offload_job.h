// SPDX-License-Identifier: Apache-2.0
// A job of OffloadWorker, from its plan to its report.
#pragma once

#include <memory>
#include <vector>

#include "kvcache/store_tier.h"
#include "kvcache/transfer_plan.h"

namespace torpor {

struct OffloadJob {
  PlannedJob planned;
  std::vector<int32_t> from;
  std::vector<int32_t> to;
  std::vector<ChunkPlan> plans{};
  std::unique_ptr<StoreTier> tier{};
  std::unique_ptr<StoreTier> source{};
  Status refused{};
};

}  // namespace torpor
