// SPDX-License-Identifier: Apache-2.0
// DiskSegments: the segments of the disk slots of a BlockIndex: which one is filled, and which one is evicted next.
//
// A slot is a position in a segment; positions are handed out in order, and used once until the segment is emptied. A
// segment is untouched → open → closed → emptied, and then open again. One at most is open. The closed ones wait for
// their eviction in two lists: those without a useful block, then all others, the oldest first. A block is useful if it
// is visible, and its namespace is in use. A segment with a pin is passed over, and keeps its age.
//
// It knows no keys and no states of slots: the index reports what changes. All memory is allocated at the beginning.
//
// Owner and threads: the index's.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "kvcache/flat_array.h"
#include "kvcache/slot_list.h"
#include "offload/block_key.h"

namespace torpor {

class DiskSegments {
 public:
  struct Segment {
    int32_t before;  // in its list
    int32_t after;
    int32_t written;  // positions handed out
    int32_t useful;   // blocks
    uint64_t pins;    // sum over its slots
    bool closed;
    bool stale;  // closed, without a useful block
  };

  DiskSegments() = default;
  // kResourceExhausted: no memory.
  static Result<DiskSegments> create(int32_t segments, int32_t segment_slots);

  int32_t segment_of(Slot slot) const { return slot / segment_slots_; }
  Slot begin_of(int32_t number) const { return number * segment_slots_; }                     // its first slot
  Slot end_of(int32_t number) const { return begin_of(number) + segments_[number].written; }  // behind its last
  int32_t begun() const { return begun_; }  // the first segment that was never used
  const Segment& operator[](int32_t number) const { return segments_[number]; }

  // Close the open segment if it is full. Return whether append() has a position: else empty() a segment first.
  bool has_position();
  // Hand out the next position. Precondition: has_position().
  Slot append();
  // Add no more blocks to the open segment.
  void close();
  // Return how many positions are left before a segment is emptied.
  int64_t room() const;
  // Return the segment that is evicted next; -1 if every closed one has a pin.
  int32_t next_to_leave() const;
  // Forget what a closed segment has, and open it for other blocks. Precondition: none is open.
  void empty(int32_t number);

  void pin(Slot slot) { ++segments_[segment_of(slot)].pins; }
  void unpin(Slot slot) { --segments_[segment_of(slot)].pins; }
  // Note that `by` more of the segment's blocks are useful.
  void useful_changed(int32_t number, int by);

  uint64_t bytes() const { return segments_.bytes(); }  // memory, once everything is in use
  // kInternal: a segment is in the wrong list, in none or in two.
  Status check() const;

 private:
  SlotList& list_of(const Segment& segment) { return segment.stale ? stale_ : closed_; }

  FlatArray<Segment> segments_;
  int32_t segment_slots_ = 1;
  int32_t begun_ = 0;
  int32_t open_ = -1;
  SlotList closed_;
  SlotList stale_;
};

}  // namespace torpor
