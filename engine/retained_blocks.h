// SPDX-License-Identifier: Apache-2.0
// RetainedBlocks: KV blocks that the last sleep copied and that stay in the arena after the wake. The next sleep takes
// over those whose content is still current, and copies the rest.
//
// Equal hashes are not equal bytes. A block is identified by its content version (KvBlock::version); a block without
// one by the number of steps that the engine had taken when it was copied. No bytes are read to compare. The arena
// evicts these blocks first if it needs memory: give_up().
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

// Identifies the content of a device block. Two blocks with the same_as() content have the same bytes.
struct BlockContent {
  uint64_t version = 0;  // 0: it has none
  uint64_t steps = 0;    // number of steps that the engine had taken; 0: not known
  bool same_as(const BlockContent& other) const {
    return version != 0 ? version == other.version : other.version == 0 && steps != 0 && steps == other.steps;
  }
};

// Return the content of each block. kCorruption: `versions` is not empty, and its length is not that of `blocks`.
Result<std::vector<BlockContent>> contents_of(std::span<const int32_t> blocks, std::span<const uint64_t> versions,
                                              uint64_t steps);

class RetainedBlocks {
 public:
  struct Block {
    SavedChunk chunk;
    HostArena::Span bytes;
    BlockContent content;
  };

  // Replace the retained blocks by as many of these as the budget allows: those with a version first, else in the given
  // order. If there is no memory for the list, none is retained.
  void keep(std::vector<Block> blocks, uint64_t budget_bytes) noexcept;
  // Return for each wanted block the bytes that take() would find; 0: none.
  std::vector<uint64_t> find(std::span<const int32_t> wanted, std::span<const BlockContent> contents) const;
  // Move out each wanted block whose content is current: one entry for each of `wanted`, with empty `bytes` if there is
  // none. All other blocks are released.
  std::vector<Block> take(std::span<const int32_t> wanted, std::span<const BlockContent> contents);
  // Release at least `bytes`, or all; return how many were released.
  uint64_t give_up(uint64_t bytes) noexcept;
  void clear() noexcept;
  uint64_t bytes() const;

 private:
  mutable Mutex mutex_;                                  // not held while memory is given back to the arena
  std::vector<Block> blocks_ TORPOR_GUARDED_BY(mutex_);  // evicted from the end
  uint64_t bytes_ TORPOR_GUARDED_BY(mutex_) = 0;
};

}  // namespace torpor
