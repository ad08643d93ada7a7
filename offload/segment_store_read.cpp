// SPDX-License-Identifier: Apache-2.0
// SegmentStore: reads records, and opens and closes the files of segments.
#include <algorithm>
#include <iterator>

#include <fmt/core.h>

#include "offload/segment.h"
#include "offload/segment_store.h"

namespace torpor {

struct SegmentStore::Reading {
  RecordPart* part = nullptr;
  SegmentPtr segment;
  FileRecord record{};
};

// ---- get

void SegmentStore::do_get(std::span<RecordPart> parts) {
  std::vector<Reading> readings = look_up(parts);
  uint64_t most = 0;
  for (const Reading& reading : readings) most += RecordFile::scratch_to_read(reading.record);
  ScratchPool::Lease scratch(scratch_);
  std::span<std::byte> room = scratch->room(most);
  const bool enough = room.size() >= most;
  for (size_t first = 0; first < readings.size() && enough;) {
    size_t end = first + 1;
    while (end < readings.size() && readings[end].segment == readings[first].segment) ++end;
    read(std::span(readings).subspan(first, end - first), room);
    first = end;
  }
  for (Reading& reading : readings) {
    reading.part->status = enough ? std::move(reading.record.status) : Status(no_memory_for(most));
    if (!reading.part->status) {
      note(reading.part->status.error(), false);
      continue;
    }
    const MutexLock lock(mutex_);
    health_.got_bytes += reading.record.stored;
  }
}

std::vector<SegmentStore::Reading> SegmentStore::look_up(std::span<RecordPart> parts) {
  std::vector<Reading> readings;
  readings.reserve(parts.size());
  const MutexLock lock(mutex_);
  for (RecordPart& part : parts) {
    if (!part.status) continue;
    SegmentTable::Found found = segments_.find_record(slot_of(part));
    if (found.segment == nullptr) {
      part.status = not_there(slot_of(part));
      continue;
    }
    const SegmentRecord& record = *found.record;
    if (record.bytes != part.bytes.size()) {
      part.status = wrong_size(part, record.bytes);
      continue;
    }
    describe(part, stored_record(record));
    FileRecord in_file = file_record(record, part.bytes, found.segment->file_of_records());
    readings.push_back({&part, std::move(found.segment), std::move(in_file)});
  }
  std::stable_sort(readings.begin(), readings.end(), [](const Reading& a, const Reading& b) {
    return a.segment->header.number < b.segment->header.number;
  });
  return readings;
}

// Read records that are all of one segment.
void SegmentStore::read(std::span<Reading> readings, std::span<std::byte>& room) {
  const Result<std::shared_ptr<File>> file = file_of(*readings[0].segment);
  std::vector<FileRecord> records;
  records.reserve(readings.size());
  for (Reading& reading : readings) {
    if (!file) reading.record.status = file.error();
    records.push_back(std::move(reading.record));
  }
  if (file) readings[0].segment->file_of_records().read(**file, records, room);
  for (size_t i = 0; i < readings.size(); ++i) readings[i].record = std::move(records[i]);
}

// Return the segment's file; open it again if it was closed.
Result<std::shared_ptr<File>> SegmentStore::file_of(Segment& segment) {
  {
    const MutexLock lock(mutex_);
    segment.last_use = ++uses_;
    if (segment.file != nullptr) return segment.file;
    if (!segment.is_there())
      return not_there(static_cast<StoreSlot>(segment.header.number) * traits_.slots_per_segment);
  }
  TORPOR_ASSIGN_OR_RETURN(const std::shared_ptr<File> opened,
                          directory_->open_file(segment.header.number, options_.io));
  {
    const MutexLock lock(mutex_);
    if (segment.is_there()) segment.file = opened;
  }
  close_oldest();
  return opened;
}

// Close the files that were used longest ago until at most `open_files` are left, among segments that take no more
// records. Sync a segment before closing its file if that is still due: an fsync of a reopened file may not report an
// error of earlier writes.
void SegmentStore::close_oldest() {
  std::vector<SegmentPtr> oldest;
  std::vector<SegmentPtr> unsafe;
  {
    const MutexLock lock(mutex_);
    for (const auto& [number, segment] : segments_.all()) {
      if (segment->file != nullptr && segment->finished) oldest.push_back(segment);
    }
    if (oldest.size() <= options_.open_files) return;
    std::sort(oldest.begin(), oldest.end(),
              [](const SegmentPtr& a, const SegmentPtr& b) { return a->last_use < b->last_use; });
    oldest.resize(oldest.size() - options_.open_files);
    std::copy_if(oldest.begin(), oldest.end(), std::back_inserter(unsafe),
                 [](const SegmentPtr& segment) { return !segment->is_safe() && !segment->recovered; });
  }
  if (!unsafe.empty()) (void)make_safe(unsafe);  // segments whose sync fails are dropped, counted and logged
  std::vector<std::shared_ptr<File>> closing;
  const MutexLock lock(mutex_);
  for (const SegmentPtr& segment : oldest) closing.push_back(std::move(segment->file));
}

}  // namespace torpor
