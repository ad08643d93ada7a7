// SPDX-License-Identifier: Apache-2.0
// EvictionOrder: chooses which cached block of a pool is evicted next.
//
// It contains only blocks that nobody keeps. A policy forgets a block when it is evicted; only S3-FIFO remembers some,
// as ghosts. Only the construction allocates, because blocks are released in destructors. Threads: the owner's lock
// guards it.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "base/digest.h"

namespace torpor {

enum class EvictionPolicy : uint8_t {
  kLru,     // the block released longest ago
  kFifo,    // the block registered longest ago
  kLfu,     // the block with the fewest hits; of these the one released longest ago
  kS3Fifo,  // Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023
};
std::string_view name(EvictionPolicy policy);  // "lru", "fifo", "lfu", "s3-fifo"

class EvictionOrder {
 public:
  virtual ~EvictionOrder() = default;
  // Add a block that was released. `fresh`: it was registered since it was last in here.
  virtual void add(int32_t id, const Digest& key, bool fresh) = 0;
  virtual void hit(int32_t id) = 0;      // removes it: it is kept again
  virtual void discard(int32_t id) = 0;  // removes it: its content is gone
  virtual bool empty() const = 0;
  virtual int32_t evict() = 0;  // removes and returns the next block; precondition: not empty
  // Return all blocks, the next one first. Exact for all policies but S3-FIFO, which decides at the eviction.
  virtual std::vector<int32_t> order() const = 0;
};

std::unique_ptr<EvictionOrder> make_eviction_order(EvictionPolicy policy, int32_t num_blocks);

}  // namespace torpor
