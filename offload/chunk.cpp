// SPDX-License-Identifier: Apache-2.0
#include "offload/chunk.h"

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

}  // namespace torpor
