// SPDX-License-Identifier: Apache-2.0
// SegmentTable: the segments of a SegmentStore, by number: which of them take records, which record is in a slot, and
// how many bytes of the disk they hold.
//
//   begin → making → open → ended → gone    (Segment::State)
//
// It decides and counts. The store makes, reads, writes and removes the files, and waits.
//
// Owner: SegmentStore. Threads: the store's lock guards the table, and the content of its segments too. Failure: errors
// are values; memory that is missing is thrown.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "base/seal.h"
#include "base/status.h"
#include "offload/segment.h"
#include "offload/segment_format.h"
#include "offload/slot_store.h"

namespace torpor {

using SegmentPtr = std::shared_ptr<Segment>;

// Return the number of the segment that has the slot, of segments with so many slots.
inline uint64_t segment_of(StoreSlot slot, int32_t slots) { return static_cast<uint64_t>(slot / slots); }

struct SegmentRules {  // the same for all segments of a store
  int32_t rank = 0;
  int32_t slots = 0;               // of each segment
  uint64_t capacity = 0;           // bytes of the disk that a segment may need
  uint64_t budget_bytes = 0;       // most that all segments take; 0: no limit
  uint64_t first_number = 0;       // segments before it are of earlier processes
  std::shared_ptr<const Key> key;  // null: segments detect accidents, not attackers
  bool encrypt = false;
};

class SegmentTable {
 public:
  static constexpr uint32_t kOpenSegments = 32;

  explicit SegmentTable(SegmentRules rules) : rules_(std::move(rules)) {}

  // Open the namespace with this digest: a key whose `space` is this number belongs to it.
  void open_space(uint32_t space, const Digest& digest) { spaces_[space] = digest; }
  // Return the header of the namespace's segments, without number, id and key. kFailedPrecondition: the namespace was
  // not opened.
  Result<SegmentHeader> header_of(uint32_t space) const;

  const std::map<uint64_t, SegmentPtr>& all() const { return segments_; }
  SegmentPtr find(uint64_t number) const;  // null: there is none
  struct Found {
    SegmentPtr segment;  // null: the slot has no record
    const SegmentRecord* record = nullptr;
  };
  Found find_record(StoreSlot slot) const;

  // Begin a segment whose file the caller makes next, then calls open() or cancel(). kFailedPrecondition: the number is
  // of an earlier process or too old, or the namespace was not opened. kResourceExhausted: the budget is used up.
  Result<SegmentPtr> begin(uint64_t number, uint32_t space);
  // Let a begun segment take records, and end those that are kOpenSegments behind the newest.
  void open(Segment& segment);
  // Forget a begun segment whose file could not be made, or that was dropped meanwhile. Return its file, to be closed.
  std::shared_ptr<File> cancel(const SegmentPtr& segment);
  // Add a segment of an earlier process, which takes no records.
  void add(const SegmentPtr& segment);

  struct Ended {
    SegmentPtr segment;
    std::shared_ptr<File> file;
    uint64_t end = 0;  // the length to which the file is cut
  };
  // Return the segments that take no more records since the last call, and have no batch under way.
  std::vector<Ended> take_ended();
  // Note that a segment's file was cut.
  void cut(Segment& segment, uint64_t end);
  // Note that a segment's name, and its file up to `end`, are durable. Drop the records that recovery would not find,
  // because they lie behind a batch page that could not be written; return their number.
  size_t synced(Segment& segment, uint64_t end);

  struct Drop {
    StoreSlot next = 0;     // the first slot behind the segment; `end` at most
    bool is_whole = false;  // the segment is gone
    uint64_t number = 0;
    std::shared_ptr<File> file;  // to be closed
  };
  // Drop the slots from `first` to `end` that are in one segment: the first of these segments that exists.
  Drop drop(StoreSlot first, StoreSlot end);
  // Drop all records of a segment. Return its file, to be closed.
  std::shared_ptr<File> forget(Segment& segment);

  uint64_t held_bytes() const { return held_bytes_; }        // of the disk
  uint64_t dropped_bytes() const { return dropped_bytes_; }  // as stored

 private:
  void drop_place(Segment::Place& place);

  const SegmentRules rules_;
  std::map<uint64_t, SegmentPtr> segments_;
  std::vector<SegmentPtr> unfinished_;  // take records, or must be cut
  uint64_t newest_ = 0;
  std::map<uint32_t, Digest> spaces_;
  uint64_t held_bytes_ = 0;
  uint64_t dropped_bytes_ = 0;
};

}  // namespace torpor
