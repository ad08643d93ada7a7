// SPDX-License-Identifier: Apache-2.0
#include "engine/block_copies.h"

#include <set>
#include <vector>

#include <fmt/core.h>

namespace torpor {
namespace {

Error invalid(std::string what) {
  return {.code = Code::kInvalidArgument, .what = std::move(what), .next_step = "this is a mistake in the caller"};
}

}  // namespace

Result<orders::CopyBlocks::Reply> copy_blocks_within(DeviceMemory& device, const KvLayout& layout,
                                                     const orders::CopyBlocks& order) {
  if (order.from.size() != order.to.size())
    return invalid(fmt::format("{} KV blocks to copy into {}", order.from.size(), order.to.size()));
  const std::set<int32_t> sources(order.from.begin(), order.from.end());
  std::set<int32_t> targets;
  std::vector<InnerCopy> copies;
  orders::CopyBlocks::Reply reply;
  for (size_t i = 0; i < order.from.size(); ++i) {
    for (const int32_t block : {order.from[i], order.to[i]}) {
      if (block < 0 || static_cast<uint32_t>(block) >= layout.num_blocks)
        return invalid(fmt::format("KV block {} does not exist, there are {}", block, layout.num_blocks));
    }
    if (!targets.insert(order.to[i]).second || sources.contains(order.to[i]))
      return invalid(fmt::format("KV block {} is a target, and another target or a source", order.to[i]));
    const std::vector<DevicePiece> from = layout.pieces_of(static_cast<uint32_t>(order.from[i]));
    const std::vector<DevicePiece> to = layout.pieces_of(static_cast<uint32_t>(order.to[i]));
    for (size_t piece = 0; piece < from.size(); ++piece) {
      copies.push_back({.to = to[piece].address, .from = from[piece].address, .bytes = from[piece].bytes});
      reply.bytes += from[piece].bytes;
    }
  }
  if (copies.empty()) return reply;
  TORPOR_RETURN_IF_ERROR(device.synchronize());  // an earlier step may still write into these blocks
  TORPOR_RETURN_IF_ERROR(device.copy_within(copies));
  return reply;
}

}  // namespace torpor
