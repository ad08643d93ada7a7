// SPDX-License-Identifier: Apache-2.0
#include "offload/chunk.h"

#include "base/units.h"

#include <fmt/core.h>

namespace torpor {

std::string ChunkKey::to_string() const {
  return kind == ChunkKind::kKvBlock ? fmt::format("{} block {}", tag, index)
                                     : fmt::format("{}/{}[{}]", tag, region, index);
}

uint64_t ChunkPlan::bytes() const {
  uint64_t sum = 0;
  for (const DevicePiece& piece : pieces) sum += piece.bytes;
  return sum;
}

uint64_t bytes_of(std::span<const ChunkPlan> plans) {
  uint64_t sum = 0;
  for (const ChunkPlan& plan : plans) sum += plan.bytes();
  return sum;
}

size_t end_of_job(std::span<const ChunkPlan> plans, size_t first, uint64_t most) {
  size_t end = first;
  for (uint64_t padded = 0; end < plans.size(); ++end) {
    padded += align_up(plans[end].bytes(), kPage);
    if (end > first && padded > most) break;
  }
  return end;
}

}  // namespace torpor
