// SPDX-License-Identifier: Apache-2.0
// DeviceBlocks: the engine's KV blocks as offloading sees them. They stay the engine's: it says what content a block
// has now, and keeps it while somebody asks for that. BlockPool implements it; an engine with blocks of its own does
// too.
//
// Threads: the scheduler's. Nothing here blocks or fails.
#pragma once

#include <cstdint>
#include <span>

#include "kvcache/block_locations.h"

namespace torpor {

class DeviceBlocks {
 public:
  virtual ~DeviceBlocks() = default;
  // Of the present content; kNone: it is not full, or may still be written.
  virtual ContentVersion version(int32_t block) const = 0;
  // Weak to strong: those that still have their version are kept from now on, and their held[i] is 1; else 0.
  virtual void hold(std::span<const int32_t> blocks, std::span<const ContentVersion> versions,
                    std::span<uint8_t> held) = 0;
  // Ends one hold() of each. Those that nobody else keeps go to the end of the free queue.
  virtual void release(std::span<const int32_t> blocks) = 0;
};

}  // namespace torpor
