// SPDX-License-Identifier: Apache-2.0
// DeviceChunks: the chunks of a rank's device memory, and where their bytes lie. The tag of the KV cache consists of
// blocks, each one chunk. Every other tag consists of regions, cut into chunks of 4 MiB.
//
// Owner: RegionImages. Threads: the caller holds RankMemory's lock.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "allocator/sleep_allocator.h"
#include "base/status.h"
#include "kvcache/kv_layout.h"
#include "offload/chunk.h"

namespace torpor {

class DeviceChunks {
 public:
  static constexpr uint64_t kRegionChunk = 4ull << 20;  // bytes

  explicit DeviceChunks(const SleepAllocator& allocator) : allocator_(allocator) {}

  // Make `tag` the one that consists of KV blocks with this layout. kInvalidArgument: a block lies outside the tag's
  // regions.
  Status set_kv_layout(std::string tag, const KvLayout& layout);
  // Forget the layout: there are no blocks any more.
  void clear_kv_layout();
  const KvLayout& kv_layout() const { return kv_layout_; }  // merged
  const std::string& kv_tag() const { return kv_tag_; }
  uint64_t block_bytes() const { return block_bytes_; }
  bool holds_blocks(const RegionInfo& region) const;

  Status check(int32_t block) const;  // kIncompatible: there is no such block
  // Return the key of a block. kIncompatible: there is no such block.
  Result<ChunkKey> key_of(int32_t block) const;
  // Return where each of these blocks lies. kIncompatible: one does not exist.
  Result<std::vector<ChunkPlan>> of_blocks(std::span<const int32_t> blocks) const;
  // Return all chunks of a tag that has no blocks.
  std::vector<ChunkPlan> of_tag(std::string_view tag) const;
  // Return where each saved chunk belongs, by its key. The chunks may have any order. kIncompatible names a chunk whose
  // memory does not exist.
  Result<std::vector<ChunkPlan>> of_saved(std::span<const SavedChunk> saved) const;

 private:
  Result<ChunkPlan> of_block(int32_t block) const;

  const SleepAllocator& allocator_;
  std::string kv_tag_;
  KvLayout kv_layout_;
  uint64_t block_bytes_ = 0;
};

}  // namespace torpor
