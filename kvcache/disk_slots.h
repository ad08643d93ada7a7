// SPDX-License-Identifier: Apache-2.0
// DiskSlots: where the slots of a block index lie in a store on disk. An index uses its slots again and again; a store
// uses each of its own once while a process uses its directory. So each segment of the index gets a new segment of the
// store when it is first written, and a block that the store had at its start stays where it is until the index evicts
// it.
//
// Owner: the component that moves bytes for the index. Threads: one.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "offload/slot_store.h"

namespace torpor {

class DiskSlots {
 public:
  // `first`: the store's first slot that was never used, as are all after it.
  DiskSlots(int32_t segments, int32_t segment_slots, StoreSlot first);

  // Return the slot of the store, -1 if nothing was put there.
  StoreSlot slot_to_read(Slot slot) const { return slots_[static_cast<size_t>(slot)]; }
  // Return the slot of the store in which the index's slot is written now.
  StoreSlot slot_to_write(Slot slot);

  // Note the slots that the store had at its start. The caller then adopts some of them.
  void note_recovered(std::span<const RecoveredSlot> recovered);
  void adopt(Slot slot, StoreSlot recovered);
  // Return, and forget, the store's segments of which no slot was adopted.
  std::vector<SlotRange> take_unadopted();

  // Release a segment that the index has evicted: append the numbers of the store's segments that no slot uses any more
  // to `gone`. This allocates nothing if `gone` has the capacity most_gone(segments).
  void release_segment(int32_t segment, std::vector<int64_t>& gone);
  size_t most_gone(size_t segments) const { return segments + adopted_.size(); }
  // Append the range of each segment in `gone` once. `gone` is sorted.
  void add_ranges(std::vector<int64_t>& gone, std::vector<SlotRange>& ranges) const;

 private:
  static constexpr int64_t kNoSegment = -1;
  SlotRange range_of(int64_t segment) const { return {.first = segment * segment_slots_, .count = segment_slots_}; }

  const int32_t segment_slots_;
  std::vector<StoreSlot> slots_;        // by slot of the index; -1: nothing was put there
  std::vector<int64_t> segments_;       // of the store, by segment of the index; kNoSegment: not begun
  std::map<int64_t, int32_t> adopted_;  // slots of the index, by the store's recovered segment
  int64_t next_segment_;
};

}  // namespace torpor
