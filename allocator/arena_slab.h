// SPDX-License-Identifier: Apache-2.0
// ArenaSlab: a piece of host memory that an arena has taken from the system and perhaps pinned for a device.
//
// Owner: HostArena, which lets one thread at a time work on a slab. Threads: none. The functions take long; call them
// without the arena's lock. Failure: memory that cannot be pinned is used unpinned. Memory that cannot be unpinned is
// never given back.
#pragma once

#include <cstddef>
#include <cstdint>

#include "allocator/arena_ranges.h"
#include "allocator/numa_memory.h"
#include "base/status.h"

namespace torpor {

class DeviceMemory;

struct ArenaSlab {
  std::byte* data = nullptr;
  uint64_t size = 0;
  uint64_t pinned = 0;                  // so many of the first bytes are pinned
  bool stuck = false;                   // a part of it cannot be unpinned: never give it back
  bool refused = false;                 // the device would not pin it
  bool pin_later = false;               // the device would not pin it at that time; try again
  ArenaRanges::Range* range = nullptr;  // the first range in the slab
  bool unused() const { return range->free && range->size == size; }
};

// Take `size` bytes from the system, on the NUMA node of `target` (prefer_target()). No page is touched.
Result<std::byte*> map_slab(uint64_t size, NumaSystem& numa, NumaTarget& target);
// Pin the part that is not pinned yet, with calls of at most `piece` bytes. If `device` is null, do nothing.
void pin_slab(ArenaSlab& slab, DeviceMemory* device, uint64_t piece) noexcept;
// Return the slab's memory to the system. False: the slab must stay, because the device may still know it.
bool drop_slab(const ArenaSlab& slab, DeviceMemory* device) noexcept;

}  // namespace torpor
