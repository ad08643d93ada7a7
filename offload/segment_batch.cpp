// SPDX-License-Identifier: Apache-2.0
#include "offload/segment_batch.h"

#include <algorithm>
#include <set>

#include <fmt/core.h>

namespace torpor {

Status SegmentBatch::encode(PageBuffer& scratch, const CompressionOptions& compression) {
  const RecordFile file = segment_.file_of_records();
  uint64_t most = kPage;
  for (const RecordPart* part : parts_) most += file.scratch_to_encode(part->bytes, compression);
  std::span<std::byte> room = scratch.room(most);
  if (room.empty()) return no_memory_for(most);
  page_ = room.first(kPage);
  room = room.subspan(kPage);
  items_.reserve(parts_.size());
  writes_.reserve(parts_.size() + 1);
  for (RecordPart* part : parts_) {
    Item& item = items_.emplace_back();
    item.part = part;
    item.record = {.hash = key_of(*part).hash,
                   .group = key_of(*part).group,
                   .position = static_cast<uint32_t>(slot_of(*part) % segment_.header.slots),
                   .bytes = part->bytes.size(),
                   .digest = part->chunk->digest};
    item.in_file = file_record(item.record, part->bytes, file);
    file.encode(item.in_file, room, compression);
    item.record.stored = item.in_file.stored;
    item.record.codec = item.in_file.codec;
    describe(*part, stored_record(item.record));
  }
  return ok();
}

Result<bool> SegmentBatch::reserve() {
  if (segment_.state != Segment::State::kOpen) return segment_closed(segment_.header.number);
  // Allocate first: sync() would wait for ever for a batch that was reserved and never finished.
  std::set<uint32_t> positions;
  for (Item& item : items_) {
    const bool unused = segment_.places[item.record.position].use == Segment::Use::kUnused;
    if (unused && positions.insert(item.record.position).second) continue;
    item.part->status = Error{.code = Code::kFailedPrecondition,
                              .what = fmt::format("slot {} of the disk store was used before", slot_of(*item.part)),
                              .next_step = "use another one"};
  }
  if (!positions.empty()) segment_.under_way.insert(segment_.end);
  std::erase_if(items_, [](const Item& item) { return !item.part->status; });
  if (items_.empty()) return false;
  file_ = segment_.file;
  offset_ = segment_.end;
  for (const uint32_t position : positions) segment_.places[position].use = Segment::Use::kWriting;
  uint64_t end = offset_ + kPage;
  for (Item& item : items_) {
    item.in_file.offset = item.record.offset = record_offset(end, item.record.stored);
    end = record_end(item.record);
  }
  segment_.end = end;
  segment_.used += items_.size();
  return true;
}

void SegmentBatch::write() {
  std::vector<SegmentRecord> records;
  for (Item& item : items_) {
    segment_.file_of_records().seal(item.in_file);
    item.record.seal = item.in_file.seal;
    records.push_back(item.record);
  }
  write_batch(page_, segment_.header, offset_, records, segment_.seal.get());
  writes_.push_back({offset_, page_, ok()});
  for (Item& item : items_) {
    FilePart& last = writes_.back();
    const std::span<std::byte> pages = item.in_file.pages;
    if (last.bytes.data() + last.bytes.size() == pages.data() &&
        last.offset + last.bytes.size() == item.record.offset) {
      last.bytes = {last.bytes.data(), last.bytes.size() + pages.size()};
    } else {
      writes_.push_back({item.record.offset, pages, ok()});
    }
    item.write = writes_.size() - 1;
  }
  file_->pwrite_all(writes_);
  for (Item& item : items_) item.part->status = writes_[item.write].status;
  written_ = writes_[0].status.has_value();
  if (written_) return;
  for (Item& item : items_) item.part->status = writes_[0].status;
}

// Make the written records visible. If the batch page was not written, recovery ends there, so end the segment: nothing
// more is put behind it.
uint64_t SegmentBatch::finish() {
  uint64_t stored = 0;
  segment_.under_way.erase(offset_);
  if (!written_) {
    segment_.broken_at = std::min(segment_.broken_at, offset_);
    if (segment_.state == Segment::State::kOpen) segment_.state = Segment::State::kEnded;
  }
  for (Item& item : items_) {
    Segment::Place& place = segment_.places[item.record.position];
    if (item.part->status && (place.use != Segment::Use::kWriting || !segment_.is_there()))
      item.part->status = no_content("disk", slot_of(*item.part));  // dropped meanwhile
    place.use = item.part->status ? Segment::Use::kStored : Segment::Use::kGone;
    place.record = item.record;
    if (item.part->status) stored += item.record.stored;
  }
  return stored;
}

}  // namespace torpor
