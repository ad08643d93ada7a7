// SPDX-License-Identifier: Apache-2.0
#include "engine/device_chunks.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include <fmt/core.h>

#include "base/units.h"

namespace torpor {

// Every piece must lie inside a region of the tag, so that a block number from a file can never reach other memory.
Status DeviceChunks::set_kv_layout(std::string tag, const KvLayout& layout) {
  TORPOR_RETURN_IF_ERROR(layout.validate());
  const std::vector<RegionInfo> regions = allocator_.regions_of(tag);
  // Blocks lie at equal distances. So if the first and the last are in one region, all others are.
  for (const KvTensor& tensor : layout.tensors) {
    for (uint64_t layer = 0; layer < tensor.layers; ++layer) {
      const uint64_t begin = tensor.address + layer * tensor.layer_stride;
      const uint64_t end = begin + (layout.num_blocks - 1) * tensor.block_stride + tensor.block_bytes;
      const bool inside = std::any_of(regions.begin(), regions.end(), [&](const RegionInfo& region) {
        return begin >= region.address && end <= region.address + region.size_bytes;
      });
      if (!inside) {
        return Error{.code = Code::kInvalidArgument,
                     .what = fmt::format("the KV layout puts {} blocks at {:#x} to {:#x}, outside the regions of {}",
                                         layout.num_blocks, begin, end, tag),
                     .next_step = "give the layout that the engine allocated"};
      }
    }
  }
  kv_tag_ = std::move(tag);
  kv_layout_ = layout.merged();
  block_bytes_ = kv_layout_.bytes_per_block();
  return ok();
}

void DeviceChunks::clear_kv_layout() {
  kv_layout_ = {};
  block_bytes_ = 0;
}

bool DeviceChunks::holds_blocks(const RegionInfo& region) const {
  return region.tag == kv_tag_ &&
         std::any_of(kv_layout_.tensors.begin(), kv_layout_.tensors.end(), [&](const KvTensor& tensor) {
           return tensor.address >= region.address && tensor.address - region.address < region.size_bytes;
         });
}

Status DeviceChunks::check(int32_t block) const {
  if (block >= 0 && static_cast<uint32_t>(block) < kv_layout_.num_blocks) return ok();
  return Error{.code = Code::kIncompatible,
               .what = fmt::format("KV block {} does not exist, there are {}", block, kv_layout_.num_blocks),
               .next_step = "start the engine as the one that slept was started"};
}

Result<ChunkKey> DeviceChunks::key_of(int32_t block) const {
  TORPOR_RETURN_IF_ERROR(check(block));
  return ChunkKey{.kind = ChunkKind::kKvBlock, .tag = kv_tag_, .index = static_cast<uint64_t>(block)};
}

Result<ChunkPlan> DeviceChunks::of_block(int32_t block) const {
  TORPOR_ASSIGN_OR_RETURN(ChunkKey key, key_of(block));
  return ChunkPlan{.key = std::move(key), .pieces = kv_layout_.pieces_of(static_cast<uint32_t>(block))};
}

Result<std::vector<ChunkPlan>> DeviceChunks::of_blocks(std::span<const int32_t> blocks) const {
  std::vector<ChunkPlan> plans;
  plans.reserve(blocks.size());
  for (const int32_t block : blocks) {
    TORPOR_ASSIGN_OR_RETURN(ChunkPlan plan, of_block(block));
    plans.push_back(std::move(plan));
  }
  return plans;
}

std::vector<ChunkPlan> DeviceChunks::of_tag(std::string_view tag) const {
  std::vector<ChunkPlan> plans;
  for (const RegionInfo& region : allocator_.regions_of(tag)) {
    for (uint64_t offset = 0; offset < region.size_bytes; offset += kRegionChunk) {
      ChunkPlan plan{.key = {.kind = ChunkKind::kRegion,
                             .tag = std::string(tag),
                             .region = region.name,
                             .index = offset / kRegionChunk},
                     .pieces = {}};
      plan.pieces.push_back({region.address + offset, std::min(kRegionChunk, region.size_bytes - offset)});
      plans.push_back(std::move(plan));
    }
  }
  return plans;
}

Result<std::vector<ChunkPlan>> DeviceChunks::of_saved(std::span<const SavedChunk> saved) const {
  std::map<std::pair<std::string_view, std::string_view>, const RegionInfo*> places;  // (tag, region name)
  std::vector<RegionInfo> regions;
  if (std::any_of(saved.begin(), saved.end(), [](const auto& each) { return each.key.kind == ChunkKind::kRegion; }))
    regions = allocator_.regions();
  for (const RegionInfo& region : regions) places[{region.tag, region.name}] = &region;
  std::vector<ChunkPlan> plans;
  plans.reserve(saved.size());
  for (const SavedChunk& chunk : saved) {
    const ChunkKey& key = chunk.key;
    if (key.kind == ChunkKind::kKvBlock) {
      TORPOR_ASSIGN_OR_RETURN(ChunkPlan plan, of_block(static_cast<int32_t>(std::min<uint64_t>(key.index, INT32_MAX))));
      plans.push_back(std::move(plan));
      continue;
    }
    const auto place = places.find({key.tag, key.region});
    const std::optional<uint64_t> offset = checked_mul(key.index, kRegionChunk);
    if (place == places.end() || !offset || *offset >= place->second->size_bytes) {
      return Error{.code = Code::kIncompatible,
                   .what = fmt::format("{} was saved, and there is no such memory here", key.to_string()),
                   .next_step = "wake it into the engine configuration that saved it"};
    }
    const RegionInfo& region = *place->second;
    plans.push_back(
        {.key = key, .pieces = {{region.address + *offset, std::min(kRegionChunk, region.size_bytes - *offset)}}});
  }
  return plans;
}

}  // namespace torpor
