// SPDX-License-Identifier: Apache-2.0
// EvictionOrder: which of the cached blocks of a pool is taken next when room is needed.
//
// Only blocks that nobody keeps stand in it. All of them forget a block when it is evicted, except for S3-FIFO's
// ghosts. Only its making takes memory: what is kept is let go of in destructors. Threads: the owner's lock guards it.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "base/digest.h"

namespace torpor {

enum class EvictionPolicy : uint8_t {
  kLru,     // the one let go longest ago
  kFifo,    // the one registered longest ago
  kLfu,     // the one hit least often, then the one let go longest ago
  kS3Fifo,  // Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023
};
std::string_view name(EvictionPolicy policy);  // "lru", "fifo", "lfu", "s3-fifo"

class EvictionOrder {
 public:
  virtual ~EvictionOrder() = default;
  // `id` was let go: it may be evicted from now on. `fresh`: it was registered since it last stood here.
  virtual void add(int32_t id, const Digest& key, bool fresh) = 0;
  virtual void hit(int32_t id) = 0;      // somebody keeps it now: it leaves
  virtual void discard(int32_t id) = 0;  // it leaves, its content is gone
  virtual bool empty() const = 0;
  virtual int32_t evict() = 0;  // the next one leaves; precondition: not empty
  // All in it, the next one first; exact for all policies but S3-FIFO, which decides while it evicts.
  virtual std::vector<int32_t> order() const = 0;
};

std::unique_ptr<EvictionOrder> make_eviction_order(EvictionPolicy policy, int32_t num_blocks);

}  // namespace torpor
