// SPDX-License-Identifier: Apache-2.0
// Segment: one segment as SegmentStore knows it. Guarded by the store's lock.
#pragma once

#include <algorithm>
#include <memory>
#include <set>
#include <vector>

#include "base/file_system.h"
#include "offload/segment_format.h"
#include "offload/slot_store.h"

namespace torpor {

// Return the unit of a file's size. Large files are whole MiB, so that the next file is likely to begin on a MiB too,
// and with it its large records, which are then read twice as fast (record_offset).
inline uint64_t granularity_of(uint64_t bytes) { return bytes >= 16 * kMiB ? kMiB : kPage; }

inline StoredRecord stored_record(const SegmentRecord& record) {
  return {.bytes = record.bytes, .stored = record.stored, .digest = record.digest, .codec = record.codec};
}

// A file of records, and the state of each of its slots.
struct Segment {
  enum class State : uint8_t { kMaking, kOpen, kEnded, kGone };
  enum class Use : uint8_t { kUnused, kWriting, kStored, kGone };
  struct Place {
    SegmentRecord record;
    Use use = Use::kUnused;
  };
  SegmentHeader header;
  uint32_t space = 0;
  std::shared_ptr<const Seal> seal;
  std::shared_ptr<File> file;  // null: closed
  State state = State::kMaking;
  bool finished = false;   // truncated to its length
  bool recovered = false;  // written by an earlier process
  bool name_is_durable = false;
  uint64_t reserved = 0;     // bytes of the disk
  uint64_t end = kPage;      // offset of the next batch
  uint64_t durable_end = 0;  // everything before this offset was synced
  // The offset of the first batch page that could not be written. Records behind it are not found after a restart.
  uint64_t broken_at = UINT64_MAX;
  std::set<uint64_t> under_way;  // offsets of batches that are being written
  std::vector<Place> places;
  size_t used = 0;
  uint64_t last_use = 0;

  bool is_there() const { return state == State::kOpen || state == State::kEnded; }
  RecordFile file_of_records() const { return {seal.get(), header.rank}; }
  bool is_safe() const { return name_is_durable && durable_end >= std::min(end, broken_at); }
};

// Read the segment that `file` has. Its records may be in the page cache only, so they count as durable after the next
// sync. `page`: a page of memory. kIncompatible: its header is not that of `wanted`, whose id and key are ignored.
// kCorruption: no record is in it. Other errors: those of File and read_header().
Result<std::shared_ptr<Segment>> read_segment(const File& file, const SegmentHeader& wanted, const Key* key,
                                              std::span<std::byte> page);

}  // namespace torpor
