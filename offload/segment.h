// SPDX-License-Identifier: Apache-2.0
// One segment as its store knows it. All under the store's lock.
#pragma once

#include <algorithm>
#include <memory>
#include <set>
#include <vector>

#include "base/file_system.h"
#include "offload/segment_format.h"
#include "offload/slot_store.h"

namespace torpor {

// Sizes of files. Large ones are whole MiB: then the next file is likely to begin on one too, and so its large records,
// which are read twice as fast there (record_offset).
inline uint64_t granularity_of(uint64_t bytes) { return bytes >= 16 * kMiB ? kMiB : kPage; }

inline StoredRecord stored_record(const SegmentRecord& record) {
  return {.bytes = record.bytes, .stored = record.stored, .digest = record.digest, .codec = record.codec};
}

// A file of records, and what became of each of its slots.
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
  bool finished = false;   // cut to its length
  bool recovered = false;  // not written by this process
  bool name_is_durable = false;
  uint64_t reserved = 0;            // of the disk
  uint64_t end = kPage;             // where the next batch begins
  uint64_t durable_end = 0;         // what lies before was synced
  uint64_t broken_at = UINT64_MAX;  // of a batch page that is not there: what lies behind is not found after a restart
  std::set<uint64_t> under_way;     // batches being written
  std::vector<Place> places;
  size_t used = 0;
  uint64_t last_use = 0;

  bool is_there() const { return state == State::kOpen || state == State::kEnded; }
  RecordFile file_of_records() const { return {seal.get(), header.rank}; }
  bool is_safe() const { return name_is_durable && durable_end >= std::min(end, broken_at); }
};

}  // namespace torpor
