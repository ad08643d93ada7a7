// SPDX-License-Identifier: Apache-2.0
// ArenaSlab: one piece of host memory that an arena has from the system: taken, pinned for a device, given back.
//
// Owner: HostArena, which alone is at work on it. Threads: none; called without the arena's lock, for all of it takes
// its time. Failure: memory that cannot be pinned is used as it is; what cannot be unpinned stays.
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
  uint64_t pinned = 0;                  // of its first bytes
  bool stuck = false;                   // a part of it is pinned: never given back
  bool refused = false;                 // by the device, to be pinned
  bool pin_later = false;               // at that moment only
  ArenaRanges::Range* range = nullptr;  // its first
  bool unused() const { return range->free && range->size == size; }
};

// Take `size` bytes from the system, for `target` (prefer_target()); nothing is touched.
Result<std::byte*> map_slab(uint64_t size, NumaSystem& numa, NumaTarget& target);
// Pin what is not, in pieces of at most `piece` bytes, each a call of the device. Null: there is nobody to pin for.
void pin_slab(ArenaSlab& slab, DeviceMemory* device, uint64_t piece) noexcept;
// Give it back to the system. False: it must stay, for the device may still know it.
bool drop_slab(const ArenaSlab& slab, DeviceMemory* device) noexcept;

}  // namespace torpor
