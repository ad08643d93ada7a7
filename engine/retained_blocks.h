// SPDX-License-Identifier: Apache-2.0
// RetainedBlocks: KV blocks that the last sleep copied and that stay in the arena after the wake. The next sleep takes
// over those whose content is still current, and copies the rest.
//
// Equal hashes are not equal bytes. A block is identified by its content version (KvBlock::version); a block without
// one by the number of steps that the engine had taken when it was copied. No bytes are read to compare. The arena
// evicts these blocks first if it needs memory: evict().
//
// Owner: ContentIndex. Threads: any.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "offload/chunk.h"
#include "offload/host_tier.h"

namespace torpor {

// Identifies the content of a device block. Two blocks with the same_as() content have the same bytes.
struct BlockContent {
  uint64_t version = 0;  // 0: it has none
  uint64_t steps = 0;    // number of steps that the engine had taken; 0: not known
  bool known() const { return version != 0 || steps != 0; }
  bool same_as(const BlockContent& other) const {
    return version != 0 ? version == other.version : other.version == 0 && steps != 0 && steps == other.steps;
  }
};

// Return the content of each block. kCorruption: `versions` is not empty, and its length is not that of `blocks`.
Result<std::vector<BlockContent>> contents_of(std::span<const int32_t> blocks, std::span<const uint64_t> versions,
                                              uint64_t steps);

class RetainedBlocks {
 public:
  // The lists of an image (TagImage). They move from the image of one sleep to that of the next, and are not made anew
  // for each.
  struct Blocks {
    std::unique_ptr<HostTier> host;      // has the bytes; null: there are no blocks
    std::vector<SavedChunk> chunks;      // as `host` has them
    std::vector<BlockContent> contents;  // of each chunk
  };
  struct Taken {
    Blocks blocks;
    std::vector<uint64_t> bytes;  // as from find()
  };

  // Replace the retained blocks by as many of these as the budget allows: those with a version first, else in the given
  // order. Blocks without a known content are released.
  void keep(Blocks blocks, uint64_t budget_bytes);
  // Return for each wanted block the bytes of the arena that it has; 0: it is not retained with this content.
  std::vector<uint64_t> find(std::span<const int32_t> wanted, std::span<const BlockContent> contents) const;
  // Move out those that find() would find, in the order of `wanted`. All other blocks are released.
  Taken take(std::span<const int32_t> wanted, std::span<const BlockContent> contents);
  // Release at least `bytes`, or all; return how many were released.
  uint64_t evict(uint64_t bytes) noexcept;
  void clear() noexcept;
  uint64_t bytes() const;

 private:
  mutable Mutex mutex_;                      // not held while memory is given back to the arena
  Blocks blocks_ TORPOR_GUARDED_BY(mutex_);  // evicted from the end
  uint64_t bytes_ TORPOR_GUARDED_BY(mutex_) = 0;
};

}  // namespace torpor
