// SPDX-License-Identifier: Apache-2.0
// DeviceBlocks: the engine's KV blocks, as offloading sees them. The engine owns them: it knows the version of each
// block's content, and keeps blocks on request. BlockPool implements this; an engine with blocks of its own does too.
//
// Threads: the scheduler's. No method blocks or fails.
#pragma once

#include <cstdint>
#include <span>

#include "kvcache/block_locations.h"

namespace torpor {

class DeviceBlocks {
 public:
  virtual ~DeviceBlocks() = default;
  // Return the version of the block's content; kNone if the block is not full, or may still be written.
  virtual ContentVersion version(int32_t block) const = 0;
  // Keep each block that still has its version, and set its held[i] to 1; else to 0.
  virtual void hold(std::span<const int32_t> blocks, std::span<const ContentVersion> versions,
                    std::span<uint8_t> held) = 0;
  // End one hold() of each block. Blocks that nobody else keeps go to the end of the free queue.
  virtual void release(std::span<const int32_t> blocks) = 0;
};

}  // namespace torpor
