// SPDX-License-Identifier: Apache-2.0
// SegmentStore: ends segments, makes them durable, and drops them.
#include <algorithm>

#include <fmt/core.h>

#include "base/log.h"
#include "offload/segment.h"
#include "offload/segment_store.h"

namespace torpor {

// Cut the files of segments that take no more records to their length. They are synced when sync() is called or their
// files are closed: an fsync here would only delay writes.
void SegmentStore::finish_ended() {
  std::vector<SegmentTable::Ended> ended;
  {
    const MutexLock lock(mutex_);
    ended = segments_.take_ended();
  }
  for (const SegmentTable::Ended& each : ended) {
    if (const Status cut = each.file->truncate(each.end); !cut) {
      log().warn("blocks on disk: {}", cut.error());
      continue;
    }
    const MutexLock lock(mutex_);
    segments_.cut(*each.segment, each.end);
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
      for (const auto& [number, segment] : segments_.all()) {
        if (segment->is_there() && !segment->is_safe()) unsafe.push_back(segment);
      }
    }
    return make_safe(unsafe);
  });
}

// Sync the files, then their names, then count the records as durable. If a sync fails, the file may be gone, and the
// segment is dropped; but an earlier process's segment stays if only its file could not be opened, or its name not be
// synced: what was read of it at the start is there, and the next sync tries again.
Status SegmentStore::make_safe(std::span<const SegmentPtr> segments) {
  Status first;
  std::vector<std::pair<SegmentPtr, uint64_t>> synced;
  std::vector<std::pair<SegmentPtr, uint64_t>> unnamed;
  for (const SegmentPtr& segment : segments) {
    const Result<uint64_t> end = sync_one(*segment);
    if (!end) {
      if (first) first = end.error();
      continue;
    }
    const MutexLock lock(mutex_);
    (segment->name_is_durable ? synced : unnamed).emplace_back(segment, *end);
  }
  if (!unnamed.empty()) {
    const Status named = directory_->sync();
    if (!named && first) first = named;
    for (const auto& [segment, end] : unnamed) {
      if (named) {
        synced.emplace_back(segment, end);
      } else if (!segment->recovered) {
        give_up(*segment, named.error());
      }
    }
  }
  const MutexLock lock(mutex_);
  for (const auto& [segment, end] : synced) {
    const size_t lost = segments_.synced(*segment, end);
    if (lost == 0 || !first) continue;
    first = Error{.code = Code::kIo,
                  .what = fmt::format("{} records of {} lie behind a batch that could not be written", lost,
                                      segment_name(segment->header.number)),
                  .next_step = "put them again"};
  }
  return first;
}

// Sync the segment's file and return the offset up to which it is durable; give the segment up if that fails. Recovery
// ends at the first missing batch page, so this waits for the batches that are being written before that offset.
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
  if (done) return end;
  {
    const MutexLock lock(mutex_);
    if (!segment.is_there()) return end;
  }
  if (file || !segment.recovered || done.error().code == Code::kNotFound) give_up(segment, done.error());
  return done.error();
}

void SegmentStore::give_up(Segment& segment, const Error& error) {
  std::shared_ptr<File> closing;
  {
    const MutexLock lock(mutex_);
    ++health_.sync_errors;
    health_.reason = error.to_string();
    health_.degraded = true;
    failed_at_ = clock_.now();
    closing = segments_.forget(segment);
    changed_.notify_all();
  }
  log().warn("blocks on disk: {} is dropped: {}", segment_name(segment.header.number), error);
  directory_->remove(segment.header.number);
}

// ---- drop

void SegmentStore::drop(std::span<const SlotRange> ranges) {
  for (const SlotRange& range : ranges) {
    const StoreSlot end = range.first + range.count;
    for (StoreSlot first = std::max<StoreSlot>(range.first, 0); first < end;) {
      SegmentTable::Drop done;
      {
        const MutexLock lock(mutex_);
        done = segments_.drop(first, end);
        if (done.is_whole) changed_.notify_all();
      }
      first = done.next;
      if (done.is_whole && !directory_->remove_later(done.number, done.file)) directory_->remove(done.number);
    }
  }
}

}  // namespace torpor
