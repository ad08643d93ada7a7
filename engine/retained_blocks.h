// SPDX-License-Identifier: Apache-2.0
// RetainedBlocks: what the last sleep copied of KV blocks, after the wake. The next sleep takes over what is still the
// content of its block, and copies the rest.
//
// Equal keys are not equal bytes: a block is known by its version (KvBlock::version), and one without a version by the
// number of steps that the engine had taken when it was copied. Nothing is read to find out. Their memory is the first
// to go where the arena needs room: give_up().
//
// Owner: ContentIndex. Threads: any.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "allocator/host_arena.h"
#include "base/mutex.h"
#include "offload/chunk.h"

namespace torpor {

// Of a device block: with an equal one it has the same bytes.
struct BlockContent {
  uint64_t version = 0;  // 0: none
  uint64_t steps = 0;    // that the engine had taken; 0: not known
  bool same_as(const BlockContent& other) const {
    return version != 0 ? version == other.version : other.version == 0 && steps != 0 && steps == other.steps;
  }
};

// Of each of `blocks`. kCorruption: `versions`, unless it is empty, does not have one of each.
Result<std::vector<BlockContent>> contents_of(std::span<const int32_t> blocks, std::span<const uint64_t> versions,
                                              uint64_t steps);

class RetainedBlocks {
 public:
  struct Block {
    SavedChunk chunk;
    HostArena::Span bytes;
    BlockContent content;
  };

  // In place of what is there, as many as have room in the budget: those with a version first, then in their order.
  // Throws nothing: without memory none is kept.
  void keep(std::vector<Block> blocks, uint64_t budget_bytes) noexcept;
  // For each of `wanted`, how much memory take() would find; 0: none.
  std::vector<uint64_t> find(std::span<const int32_t> wanted, std::span<const BlockContent> contents) const;
  // For each of `wanted` (numbers of blocks) with its content there: it, or one without bytes. All others go.
  std::vector<Block> take(std::span<const int32_t> wanted, std::span<const BlockContent> contents);
  // Frees at least so many bytes, or all; how many.
  uint64_t give_up(uint64_t bytes) noexcept;
  void clear() noexcept;
  uint64_t bytes() const;

 private:
  mutable Mutex mutex_;                                  // memory is given back to the arena without it
  std::vector<Block> blocks_ TORPOR_GUARDED_BY(mutex_);  // the first to go is the last
  uint64_t bytes_ TORPOR_GUARDED_BY(mutex_) = 0;
};

}  // namespace torpor
