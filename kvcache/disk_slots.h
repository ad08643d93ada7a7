// SPDX-License-Identifier: Apache-2.0
// DiskSlots: where the slots of a block index lie in a store on disk. An index uses its slots again and again; a store
// uses each of its own once, in the life of its directory. So each segment of the index gets a new one of the store
// when it is first written, and what the store had at its start keeps its place there until the index lets go of it.
//
// Owner: who moves bytes for the index, on one thread.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "offload/slot_store.h"

namespace torpor {

class DiskSlots {
 public:
  // `first`: of the store, from where on no slot was ever used.
  DiskSlots(int32_t segments, int32_t segment_slots, StoreSlot first);

  // Return the slot of the store, -1 if nothing was put there.
  StoreSlot slot_to_read(Slot slot) const { return slots_[static_cast<size_t>(slot)]; }
  // Return the slot of the store in which the index's slot is written now.
  StoreSlot slot_to_write(Slot slot);

  // The store had these at its start. Each is then adopted by a slot of the index, or not.
  void note_recovered(std::span<const RecoveredSlot> recovered);
  void adopt(Slot slot, StoreSlot recovered);
  // Return the segments of which no slot was adopted; they are forgotten.
  std::vector<SlotRange> take_unadopted();

  // The index lets go of one of its segments: adds the numbers of the store's that nobody knows any more to `gone`,
  // which takes no memory where it has room for most_gone(segments).
  void release_segment(int32_t segment, std::vector<int64_t>& gone);
  size_t most_gone(size_t segments) const { return segments + adopted_.size(); }
  // Adds each of these segments of the store once.
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
