// SPDX-License-Identifier: Apache-2.0
// Reading from segments, and their open files.
#include <algorithm>
#include <iterator>

#include <fmt/core.h>

#include "offload/segment.h"
#include "offload/segment_store.h"

namespace torpor {

struct SegmentStore::Reading {
  StorePart* part = nullptr;
  SegmentPtr segment;
  SegmentRecord record;
  std::span<std::byte> whole;  // pages that hold the record; empty: to be read into scratch memory
};

// ---- get

void SegmentStore::do_get(std::span<StorePart> parts) {
  std::vector<Reading> readings = find(parts);
  uint64_t most = 0;
  for (const Reading& reading : readings) {
    if (reading.whole.empty()) most += align_up(reading.record.stored, kPage);
  }
  ScratchPool::Lease scratch(scratch_);
  std::span<std::byte> room = scratch->room(most);
  const bool enough = room.size() >= most;
  for (size_t first = 0; first < readings.size();) {
    size_t end = first + 1;
    while (end < readings.size() && readings[end].segment == readings[first].segment) ++end;
    if (!enough) {
      for (size_t i = first; i < end; ++i) readings[i].part->status = no_memory_for(most);
    } else {
      read(std::span(readings).subspan(first, end - first), room);
    }
    first = end;
  }
  for (Reading& reading : readings) {
    if (!reading.part->status) {
      note(reading.part->status.error(), false);
      continue;
    }
    const MutexLock lock(mutex_);
    health_.got_bytes += reading.record.stored;
  }
}

std::vector<SegmentStore::Reading> SegmentStore::find(std::span<StorePart> parts) {
  std::vector<Reading> readings;
  readings.reserve(parts.size());
  const MutexLock lock(mutex_);
  for (StorePart& part : parts) {
    if (!part.status) continue;
    const auto segment = segments_.find(number_of(part.slot));
    const auto position = static_cast<size_t>(part.slot % traits_.slots_per_segment);
    if (segment == segments_.end() || !segment->second->is_there() ||
        segment->second->places[position].use != Segment::Use::kStored) {
      part.status = not_there(part.slot);
      continue;
    }
    const SegmentRecord& record = segment->second->places[position].record;
    if (record.bytes != part.bytes.size()) {
      part.status = wrong_size(part, record.bytes);
      continue;
    }
    part.record = {.bytes = record.bytes, .stored = record.stored, .digest = record.digest, .codec = record.codec};
    const bool in_place = record.codec == Codec::kNone && fits_pages(part.bytes);
    readings.push_back({&part, segment->second, record, in_place ? part.bytes : std::span<std::byte>{}});
  }
  std::stable_sort(readings.begin(), readings.end(), [](const Reading& a, const Reading& b) {
    return a.segment->header.number < b.segment->header.number;
  });
  return readings;
}

// All of one segment.
void SegmentStore::read(std::span<Reading> readings, std::span<std::byte>& room) {
  const Result<std::shared_ptr<File>> file = file_of(*readings[0].segment);
  std::vector<FilePart> reads;
  for (Reading& reading : readings) {
    if (reading.whole.empty()) {
      reading.whole = room.first(align_up(reading.record.stored, kPage));
      room = room.subspan(reading.whole.size());
    }
    reads.push_back({reading.record.offset, reading.whole, file ? ok() : Status(file.error())});
  }
  if (file) (*file)->pread_all(reads);
  for (size_t i = 0; i < readings.size(); ++i) {
    readings[i].part->status = std::move(reads[i].status);
    if (readings[i].part->status) readings[i].part->status = decode(readings[i]);
  }
}

Status SegmentStore::decode(Reading& reading) const {
  const std::span<std::byte> stored = reading.whole.first(reading.record.stored);
  if (const auto& seal = reading.segment->seal; seal != nullptr) {
    const std::string what = sealed_name(reading.record);
    TORPOR_TRY(seal->open(stored, reading.record.seal, place_of(reading.segment->header, reading.record, what)));
  }
  if (stored.data() == reading.part->bytes.data()) return ok();
  return decompress(reading.record.codec, stored, reading.part->bytes);
}

// The segment's file, opened again if it was closed.
Result<std::shared_ptr<File>> SegmentStore::file_of(Segment& segment) {
  {
    const MutexLock lock(mutex_);
    segment.last_use = ++uses_;
    if (segment.file != nullptr) return segment.file;
    if (!segment.is_there())
      return not_there(static_cast<StoreSlot>(segment.header.number) * traits_.slots_per_segment);
  }
  std::shared_ptr<File> opened;
  {
    DirectoryTurn directory(*this);
    TORPOR_ASSIGN(opened, directory->open_file(segment_name(segment.header.number), options_.io));
  }
  {
    const MutexLock lock(mutex_);
    if (segment.is_there()) segment.file = opened;
  }
  close_oldest();
  return opened;
}

// Of those that take no more records, as many as are too many; those that were used longest ago. One that was not
// synced is synced first: of a file that was closed, fsync may not know what became of it.
void SegmentStore::close_oldest() {
  std::vector<SegmentPtr> oldest;
  std::vector<SegmentPtr> unsafe;
  {
    const MutexLock lock(mutex_);
    for (const auto& [number, segment] : segments_) {
      if (segment->file != nullptr && segment->finished) oldest.push_back(segment);
    }
    if (oldest.size() <= options_.open_files) return;
    std::sort(oldest.begin(), oldest.end(),
              [](const SegmentPtr& a, const SegmentPtr& b) { return a->last_use < b->last_use; });
    oldest.resize(oldest.size() - options_.open_files);
    std::copy_if(oldest.begin(), oldest.end(), std::back_inserter(unsafe),
                 [](const SegmentPtr& segment) { return !segment->is_safe() && !segment->recovered; });
  }
  if (!unsafe.empty()) (void)make_safe(unsafe);  // what cannot be made safe is dropped, counted and logged
  std::vector<std::shared_ptr<File>> closing;
  const MutexLock lock(mutex_);
  for (const SegmentPtr& segment : oldest) closing.push_back(std::move(segment->file));
}

}  // namespace torpor
