// SPDX-License-Identifier: Apache-2.0
// SegmentStore: writes batches: reserve slots, encode the page and its records, write, finish.
#include <algorithm>

#include <fmt/core.h>

#include "offload/segment.h"
#include "offload/segment_store.h"

namespace torpor {
namespace {

// Return whether the error is a mistake of the caller, which says nothing about the disk.
bool is_callers(const Error& error) {
  return error.origin == Origin::kTorpor && (error.code == Code::kFailedPrecondition ||
                                             error.code == Code::kInvalidArgument || error.code == Code::kNotFound);
}

}  // namespace

// A batch that is being written.
struct SegmentStore::Batch {
  struct Item {
    RecordPart* part = nullptr;
    SegmentRecord record;
    FileRecord in_file;  // `record` as the file stores it
    size_t write = 0;    // index into `writes`
  };
  std::span<std::byte> page;
  std::vector<Item> items;
  uint64_t offset = 0;  // of the page, in the file
  std::shared_ptr<File> file;
  std::vector<FilePart> writes;
  bool written = false;
};

// Calls finish_batch() for a reserved batch, however its writing ends: else sync() would wait for it for ever.
class SegmentStore::Writing {
 public:
  Writing(SegmentStore& store, Segment& segment, Batch& batch) : store_(store), segment_(segment), batch_(batch) {}
  ~Writing() { store_.finish_batch(segment_, batch_); }
  Writing(const Writing&) = delete;
  Writing& operator=(const Writing&) = delete;

 private:
  SegmentStore& store_;
  Segment& segment_;
  Batch& batch_;
};

void SegmentStore::do_put(std::span<RecordPart> parts) {
  remove_dropped();
  std::vector<RecordPart*> sorted;
  sorted.reserve(parts.size());
  for (RecordPart& part : parts) {
    if (part.status) sorted.push_back(&part);
  }
  const auto place = [this](const RecordPart* part) {
    return std::pair(number_of(slot_of(*part)), key_of(*part).space);
  };
  std::stable_sort(sorted.begin(), sorted.end(),
                   [&](const RecordPart* a, const RecordPart* b) { return place(a) < place(b); });
  for (size_t first = 0; first < sorted.size();) {
    size_t end = first + 1;
    while (end < sorted.size() && end - first < kBatchRecords && place(sorted[end]) == place(sorted[first])) ++end;
    put_batch(std::span(sorted).subspan(first, end - first));
    first = end;
  }
  bool any_good = false;
  for (const RecordPart* part : sorted) {
    any_good = any_good || part->status.has_value();
    if (!part->status && !is_callers(part->status.error())) note(part->status.error(), true);
  }
  if (any_good &&
      std::all_of(sorted.begin(), sorted.end(), [](const RecordPart* p) { return p->status.has_value(); })) {
    const MutexLock lock(mutex_);
    health_.degraded = false;
  }
  finish_ended();
}

void SegmentStore::put_batch(std::span<RecordPart* const> parts) {
  const auto fail = [&](const Error& error) {
    for (RecordPart* part : parts) part->status = error;
  };
  const Result<SegmentPtr> segment = writable(number_of(slot_of(*parts[0])), key_of(*parts[0]).space);
  if (!segment) return fail(segment.error());
  ScratchPool::Lease scratch(scratch_);
  Batch batch;
  const RecordFile file = (*segment)->file_of_records();
  if (const Status encoded = encode(parts, file, *scratch.operator->(), batch); !encoded) return fail(encoded.error());
  if (const Status reserved = reserve(**segment, batch); !reserved) return fail(reserved.error());
  if (batch.items.empty()) return;
  const Writing writing(*this, **segment, batch);
  const Status done = try_catch([&]() -> Status {
    write(**segment, batch);
    return ok();
  });
  if (!done) fail(done.error());
}

// Set the stored form of each part: its own memory if it can be written from there, else scratch memory.
Status SegmentStore::encode(std::span<RecordPart* const> parts, const RecordFile& file, PageBuffer& scratch,
                            Batch& batch) const {
  uint64_t most = kPage;
  for (const RecordPart* part : parts) most += file.scratch_to_encode(part->bytes, options_.compression);
  std::span<std::byte> room = scratch.room(most);
  if (room.empty()) return no_memory_for(most);
  batch.page = room.first(kPage);
  room = room.subspan(kPage);
  batch.items.reserve(parts.size());
  batch.writes.reserve(parts.size() + 1);
  for (RecordPart* part : parts) {
    Batch::Item& item = batch.items.emplace_back();
    item.part = part;
    item.record = {.hash = key_of(*part).hash,
                   .group = key_of(*part).group,
                   .position = static_cast<uint32_t>(slot_of(*part) % traits_.slots_per_segment),
                   .bytes = part->bytes.size(),
                   .digest = part->chunk->digest};
    item.in_file = file_record(item.record, part->bytes, file);
    file.encode(item.in_file, room, options_.compression);
    item.record.stored = item.in_file.stored;
    item.record.codec = item.in_file.codec;
    describe(*part, stored_record(item.record));
  }
  return ok();
}

// Reserve the range behind the last reserved batch. Remove parts from the batch whose slots were used before.
Status SegmentStore::reserve(Segment& segment, Batch& batch) {
  const MutexLock lock(mutex_);
  if (segment.state != Segment::State::kOpen) return segment_closed(segment.header.number);
  // Allocate first: sync() would wait for ever for a batch that was reserved and never finished.
  std::set<uint32_t> positions;
  for (Batch::Item& item : batch.items) {
    const bool unused = segment.places[item.record.position].use == Segment::Use::kUnused;
    if (unused && positions.insert(item.record.position).second) continue;
    item.part->status = Error{.code = Code::kFailedPrecondition,
                              .what = fmt::format("slot {} of the disk store was used before", slot_of(*item.part)),
                              .next_step = "use another one"};
  }
  if (!positions.empty()) segment.under_way.insert(segment.end);
  std::erase_if(batch.items, [](const Batch::Item& item) { return !item.part->status; });
  if (batch.items.empty()) return ok();
  batch.file = segment.file;
  batch.offset = segment.end;
  for (const uint32_t position : positions) segment.places[position].use = Segment::Use::kWriting;
  uint64_t end = batch.offset + kPage;
  for (Batch::Item& item : batch.items) {
    item.in_file.offset = item.record.offset = record_offset(end, item.record.stored);
    end = record_end(item.record);
  }
  segment.end = end;
  segment.used += batch.items.size();
  return ok();
}

void SegmentStore::write(Segment& segment, Batch& batch) {
  std::vector<SegmentRecord> records;
  for (Batch::Item& item : batch.items) {
    segment.file_of_records().seal(item.in_file);
    item.record.seal = item.in_file.seal;
    records.push_back(item.record);
  }
  write_batch(batch.page, segment.header, batch.offset, records, segment.seal.get());
  batch.writes.push_back({batch.offset, batch.page, ok()});
  for (Batch::Item& item : batch.items) {
    FilePart& last = batch.writes.back();
    const std::span<std::byte> pages = item.in_file.pages;
    if (last.bytes.data() + last.bytes.size() == pages.data() &&
        last.offset + last.bytes.size() == item.record.offset) {
      last.bytes = {last.bytes.data(), last.bytes.size() + pages.size()};
    } else {
      batch.writes.push_back({item.record.offset, pages, ok()});
    }
    item.write = batch.writes.size() - 1;
  }
  batch.file->pwrite_all(batch.writes);
  for (Batch::Item& item : batch.items) item.part->status = batch.writes[item.write].status;
  batch.written = batch.writes[0].status.has_value();
  if (batch.written) return;
  for (Batch::Item& item : batch.items) item.part->status = batch.writes[0].status;
}

// Make the written records visible. If the batch page was not written, recovery ends there, so end the segment: nothing
// more is put behind it.
void SegmentStore::finish_batch(Segment& segment, Batch& batch) {
  const MutexLock lock(mutex_);
  segment.under_way.erase(batch.offset);
  if (!batch.written) {
    segment.broken_at = std::min(segment.broken_at, batch.offset);
    if (segment.state == Segment::State::kOpen) segment.state = Segment::State::kEnded;
  }
  for (Batch::Item& item : batch.items) {
    Segment::Place& place = segment.places[item.record.position];
    if (item.part->status && (place.use != Segment::Use::kWriting || !segment.is_there()))
      item.part->status = not_there(slot_of(*item.part));  // dropped meanwhile
    place.use = item.part->status ? Segment::Use::kStored : Segment::Use::kGone;
    place.record = item.record;
    if (item.part->status) health_.put_bytes += item.record.stored;
  }
  changed_.notify_all();
}

}  // namespace torpor
