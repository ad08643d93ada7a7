// SPDX-License-Identifier: Apache-2.0
// SegmentStore: ends, syncs, drops, recovers and leases segments.
#include <algorithm>

#include <fmt/core.h>

#include "base/log.h"
#include "offload/segment.h"
#include "offload/segment_store.h"

namespace torpor {

// Cut the files of segments that take no more records to their length. They are synced when sync() is called or their
// files are closed: an fsync here would only delay writes.
void SegmentStore::finish_ended() {
  struct Ended {
    SegmentPtr segment;
    std::shared_ptr<File> file;
    uint64_t end = 0;
  };
  std::vector<Ended> ended;
  {
    const MutexLock lock(mutex_);
    ended.reserve(unfinished_.size());
    std::erase_if(unfinished_, [&](const SegmentPtr& segment) TORPOR_NO_THREAD_SAFETY_ANALYSIS {
      if (segment->state == Segment::State::kMaking || !segment->under_way.empty()) return false;
      if (segment->state == Segment::State::kGone) return true;
      if (segment->state == Segment::State::kOpen && segment->used < segment->places.size()) return false;
      segment->state = Segment::State::kEnded;
      segment->finished = true;
      ended.push_back({segment, segment->file, segment->reserved});
      uint64_t& end = ended.back().end;
      const uint64_t used = std::min(segment->end, segment->broken_at);
      end = std::min(end, align_up(used, granularity_of(end)));
      return true;
    });
  }
  for (const Ended& each : ended) {
    if (const Status cut = each.file->truncate(each.end); !cut) {
      log().warn("blocks on disk: {}", cut.error());
      continue;
    }
    const MutexLock lock(mutex_);
    if (!each.segment->is_there()) continue;
    health_.held_bytes -= each.segment->reserved - each.end;
    each.segment->reserved = each.end;
  }
  if (!ended.empty()) close_oldest();
}

// ---- sync

Status SegmentStore::sync() {
  directory_->remove_queued();
  return try_catch([this]() -> Status {
    std::vector<SegmentPtr> unsafe;
    {
      const MutexLock lock(mutex_);
      for (const auto& [number, segment] : segments_) {
        if (segment->is_there() && !segment->is_safe()) unsafe.push_back(segment);
      }
    }
    return make_safe(unsafe);
  });
}

// Sync the files, then their names, then count the records as durable. If a sync fails, the file may be gone, and the
// segment is dropped.
Status SegmentStore::make_safe(std::span<const SegmentPtr> segments) {
  Status first;
  const auto give_up_all = [&](const std::vector<std::pair<SegmentPtr, uint64_t>>& all, const Error& error) {
    if (first) first = error;
    for (const auto& [segment, end] : all) give_up(*segment, error);
  };
  std::vector<std::pair<SegmentPtr, uint64_t>> synced;
  std::vector<std::pair<SegmentPtr, uint64_t>> unnamed;
  for (const SegmentPtr& segment : segments) {
    const Result<uint64_t> end = sync_one(*segment);
    if (!end) {
      give_up_all({{segment, 0}}, end.error());
      continue;
    }
    const MutexLock lock(mutex_);
    (segment->name_is_durable ? synced : unnamed).emplace_back(segment, *end);
  }
  if (!unnamed.empty()) {
    const Status named = directory_->sync();
    if (!named) give_up_all(std::exchange(unnamed, {}), named.error());
    synced.insert(synced.end(), unnamed.begin(), unnamed.end());
  }
  const MutexLock lock(mutex_);
  for (const auto& [segment, end] : synced) {
    segment->durable_end = std::max(segment->durable_end, end);
    segment->name_is_durable = true;
    size_t lost = 0;
    for (Segment::Place& place : segment->places) {
      if (place.use != Segment::Use::kStored || place.record.offset < segment->broken_at) continue;
      place.use = Segment::Use::kGone;
      health_.dropped_bytes += place.record.stored;
      ++lost;
    }
    if (lost == 0 || !first) continue;
    first = Error{.code = Code::kIo,
                  .what = fmt::format("{} records of {} lie behind a batch that could not be written", lost,
                                      segment_name(segment->header.number)),
                  .next_step = "put them again"};
  }
  return first;
}

// Sync the segment's file and return the offset up to which it is durable. Recovery ends at the first missing batch
// page, so this waits for the batches that are being written before that offset.
Result<uint64_t> SegmentStore::sync_one(Segment& segment) {
  uint64_t end = 0;
  {
    const MutexLock lock(mutex_);
    end = segment.end;
    while (!segment.under_way.empty() && *segment.under_way.begin() < end) changed_.wait(mutex_);
    end = std::min(end, segment.broken_at);
    if (!segment.is_there()) return end;
  }
  const Result<std::shared_ptr<File>> file = file_of(segment);
  const Status done = file ? (*file)->sync() : Status(file.error());
  const MutexLock lock(mutex_);
  if (!done && segment.is_there()) return done.error();
  return end;
}

void SegmentStore::give_up(Segment& segment, const Error& error) {
  std::shared_ptr<File> closing;
  {
    const MutexLock lock(mutex_);
    ++health_.sync_errors;
    health_.reason = error.to_string();
    health_.degraded = true;
    failed_at_ = clock_.now();
    closing = forget(segment);
  }
  log().warn("blocks on disk: {} is dropped: {}", segment_name(segment.header.number), error);
  directory_->remove(segment.header.number);
}

// ---- drop

std::shared_ptr<File> SegmentStore::forget(Segment& segment) {
  for (Segment::Place& place : segment.places) {
    if (place.use == Segment::Use::kStored) health_.dropped_bytes += place.record.stored;
    place.use = Segment::Use::kGone;
  }
  segment.state = Segment::State::kGone;
  health_.held_bytes -= std::exchange(segment.reserved, 0);
  changed_.notify_all();
  return std::move(segment.file);
}

void SegmentStore::drop(std::span<const SlotRange> ranges) {
  const int64_t slots = traits_.slots_per_segment;
  for (const SlotRange& range : ranges) {
    const int64_t first = std::max<int64_t>(range.first, 0);
    const int64_t end = range.first + range.count;
    for (int64_t number = first / slots; number * slots < end; ++number) {
      std::shared_ptr<File> file;
      {
        const MutexLock lock(mutex_);
        const auto found = segments_.lower_bound(static_cast<uint64_t>(number));  // skip numbers that do not exist
        if (found == segments_.end() || static_cast<int64_t>(found->first) * slots >= end) break;
        number = static_cast<int64_t>(found->first);
        if (found->second->state == Segment::State::kGone) continue;
        const int64_t from = std::max(first - number * slots, int64_t{0});
        const int64_t to = std::min(end - number * slots, slots);
        Segment& segment = *found->second;
        if (from > 0 || to < slots) {
          for (int64_t position = from; position < to; ++position) {
            Segment::Place& place = segment.places[static_cast<size_t>(position)];
            if (place.use == Segment::Use::kStored) health_.dropped_bytes += place.record.stored;
            if (place.use == Segment::Use::kUnused) ++segment.used;
            place.use = Segment::Use::kGone;
          }
          continue;
        }
        file = forget(segment);
        if (found->first < first_number_) segments_.erase(found);
      }
      const auto gone = static_cast<uint64_t>(number);
      if (!directory_->remove_later(gone, file)) directory_->remove(gone);
    }
  }
}

// ---- recovery

Result<std::vector<RecoveredSlot>> SegmentStore::recover(uint32_t space) {
  std::vector<RecoveredSlot> found;
  {
    const MutexLock lock(mutex_);
    if (!spaces_.contains(space))
      return Error{.code = Code::kFailedPrecondition,
                   .what = fmt::format("namespace {} was not opened", space),
                   .next_step = "open it first"};
  }
  const Status done = try_catch([&]() -> Status {
    for (const uint64_t number : std::exchange(at_the_start_, {})) {
      const Status read = recover_segment(number, space, found);
      if (read) continue;
      const Code code = read.error().code;
      log().info("blocks on disk: {}: {}", segment_name(number), read.error());
      if (code == Code::kCorruption || code == Code::kIncompatible || code == Code::kUnauthenticated) {
        directory_->remove(number);
      } else {
        note(read.error(), false);
      }
    }
    return ok();
  });
  if (!done) return done.error();
  const StoreHealth now = health();
  log().info("blocks on disk: segments of {} slots, {} bytes, through {}, {} records recovered",
             traits_.slots_per_segment, capacity_, now.io, found.size());
  return found;
}

Status SegmentStore::recover_segment(uint64_t number, uint32_t space, std::vector<RecoveredSlot>& found) {
  Digest digest;
  {
    const MutexLock lock(mutex_);
    digest = spaces_.at(space);
  }
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, directory_->open_file(number, options_.io));
  ScratchPool::Lease scratch(scratch_);
  const std::span<std::byte> room = scratch->room(kPage);
  if (room.empty()) return no_memory_for(kPage);
  TORPOR_ASSIGN_OR_RETURN(const SegmentPtr segment,
                          read_segment(*file, header_of(number, digest), options_.key.get(), room.first(kPage)));
  segment->space = space;
  const MutexLock lock(mutex_);
  health_.io = file->io();
  health_.held_bytes += segment->reserved;
  for (const Segment::Place& place : segment->places) {
    if (place.use != Segment::Use::kStored) continue;
    const SegmentRecord& record = place.record;
    health_.recovered_bytes += record.stored;
    const auto slot = static_cast<StoreSlot>(number) * traits_.slots_per_segment + record.position;
    found.push_back({.slot = slot,
                     .key = {.hash = record.hash, .group = record.group, .space = space},
                     .record = stored_record(record)});
  }
  segments_.emplace(number, segment);
  return ok();
}

// ---- lease

Result<std::vector<LeasedRecord>> SegmentStore::lease(std::span<const StoreSlot> slots, Directory& into) {
  std::vector<LeasedRecord> leased;
  std::map<uint64_t, std::pair<SegmentPtr, std::vector<SegmentRecord>>> wanted;
  {
    const MutexLock lock(mutex_);
    for (const StoreSlot slot : slots) {
      const auto segment = slot < 0 ? segments_.end() : segments_.find(number_of(slot));
      if (segment == segments_.end() || !segment->second->is_there()) return not_there(slot);
      const Segment::Place& place = segment->second->places[static_cast<size_t>(slot % traits_.slots_per_segment)];
      const SegmentRecord& record = place.record;
      if (place.use != Segment::Use::kStored) return not_there(slot);
      if (record.offset >= segment->second->durable_end) {
        return Error{.code = Code::kFailedPrecondition,
                     .what = fmt::format("slot {} of the disk store was not synced", slot),
                     .next_step = "sync the store first"};
      }
      auto& [holder, records] = wanted[segment->first];
      holder = segment->second;
      records.push_back(record);
      leased.push_back({.slot = slot,
                        .file = leased_name(segment->second->header),
                        .id = segment->second->header.id,
                        .offset = record.offset,
                        .record = stored_record(record),
                        .seal = record.seal});
    }
  }
  for (const auto& [number, entry] : wanted) TORPOR_RETURN_IF_ERROR(link(*entry.first, entry.second, into));
  return leased;
}

Status SegmentStore::link(Segment& segment, std::span<const SegmentRecord> records, Directory& into) {
  const std::string name = leased_name(segment.header);
  const Status linked = directory_->link(segment.header.number, into, name);
  if (linked) return ok();
  const int64_t native = linked.error().native;
  bool is_copy = false;
  {
    const MutexLock lock(mutex_);
    is_copy = copies_.contains(fmt::format("{}/{}", into.path(), name));
    const bool refused = native == EPERM || native == EXDEV || native == EMLINK || native == EOPNOTSUPP;
    if (!is_copy && refused && copies_.empty())
      log().warn("blocks on disk: no links ({}): checkpoints get copies", linked.error().what);
    is_copy = is_copy || refused;
    if (!is_copy && native != EEXIST) return linked;
    if (is_copy) copies_.insert(fmt::format("{}/{}", into.path(), name));
  }
  if (is_copy) return copy(segment, records, into, name);
  // The name exists: either an earlier lease linked it, or it is another file.
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> there, into.open_file(name));
  ScratchPool::Lease scratch(scratch_);
  const std::span<std::byte> room = scratch->room(kPage);
  if (room.empty()) return no_memory_for(kPage);
  const std::span<std::byte> page = room.first(kPage);
  TORPOR_RETURN_IF_ERROR(there->pread(page, 0));
  const Result<OpenedHeader> header = read_header(page, options_.key.get());
  return header && header->header.id == segment.header.id ? ok() : linked;
}

// Copy the records to the same offsets, because seals bind the offset. The ranges between them take no disk space.
Status SegmentStore::copy(Segment& segment, std::span<const SegmentRecord> records, Directory& into,
                          const std::string& name) {
  TORPOR_ASSIGN_OR_RETURN(const std::shared_ptr<File> from, file_of(segment));
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> to, into.open_slots(name, options_.io));
  ScratchPool::Lease scratch(scratch_);
  const auto copy_range = [&](uint64_t offset, uint64_t bytes) -> Status {
    const std::span<std::byte> room = scratch->room(bytes);
    if (room.empty()) return no_memory_for(bytes);
    TORPOR_RETURN_IF_ERROR(from->pread(room.first(bytes), offset));
    return to->pwrite(room.first(bytes), offset);
  };
  TORPOR_RETURN_IF_ERROR(copy_range(0, kPage));
  for (const SegmentRecord& record : records) {
    TORPOR_RETURN_IF_ERROR(copy_range(record.offset, align_up(record.stored, kPage)));
    const MutexLock lock(mutex_);
    health_.copied_bytes += record.stored;
  }
  return to->sync();
}

}  // namespace torpor
