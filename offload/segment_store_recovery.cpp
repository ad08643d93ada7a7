// SPDX-License-Identifier: Apache-2.0
// SegmentStore: finds again what an earlier process stored, and leases records to checkpoints.
#include <algorithm>
#include <map>

#include <fmt/core.h>

#include "base/log.h"
#include "offload/segment.h"
#include "offload/segment_store.h"

namespace torpor {

Result<std::vector<RecoveredSlot>> SegmentStore::recover(uint32_t space) {
  std::vector<RecoveredSlot> found;
  SegmentHeader wanted;
  {
    const MutexLock lock(mutex_);
    TORPOR_ASSIGN_OR_RETURN(wanted, segments_.header_of(space));
  }
  const Status done = try_catch([&]() -> Status {
    for (const uint64_t number : std::exchange(at_the_start_, {})) {
      wanted.number = number;
      const Status read = recover_segment(wanted, space, found);
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

Status SegmentStore::recover_segment(const SegmentHeader& wanted, uint32_t space, std::vector<RecoveredSlot>& found) {
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, directory_->open_file(wanted.number, options_.io));
  ScratchPool::Lease scratch(scratch_);
  const std::span<std::byte> room = scratch->room(kPage);
  if (room.empty()) return no_memory_for(kPage);
  TORPOR_ASSIGN_OR_RETURN(const SegmentPtr segment, read_segment(*file, wanted, options_.key.get(), room.first(kPage)));
  segment->space = space;
  const MutexLock lock(mutex_);
  health_.io = file->io();
  for (const Segment::Place& place : segment->places) {
    if (place.use != Segment::Use::kStored) continue;
    const SegmentRecord& record = place.record;
    health_.recovered_bytes += record.stored;
    const auto slot = static_cast<StoreSlot>(wanted.number) * traits_.slots_per_segment + record.position;
    found.push_back({.slot = slot,
                     .key = {.hash = record.hash, .group = record.group, .space = space},
                     .record = stored_record(record)});
  }
  segments_.add(segment);
  return ok();
}

// ---- lease

Result<std::vector<LeasedRecord>> SegmentStore::lease(std::span<const StoreSlot> slots, Directory& into) {
  std::vector<LeasedRecord> leased;
  std::map<uint64_t, std::pair<SegmentPtr, std::vector<SegmentRecord>>> wanted;
  {
    const MutexLock lock(mutex_);
    for (const StoreSlot slot : slots) {
      const auto [segment, found] = segments_.find_record(slot);
      if (segment == nullptr) return not_there(slot);
      const SegmentRecord& record = *found;
      if (record.offset >= segment->durable_end) {
        return Error{.code = Code::kFailedPrecondition,
                     .what = fmt::format("slot {} of the disk store was not synced", slot),
                     .next_step = "sync the store first"};
      }
      auto& [holder, records] = wanted[segment->header.number];
      holder = segment;
      records.push_back(record);
      leased.push_back({.slot = slot,
                        .file = leased_name(segment->header),
                        .id = segment->header.id,
                        .offset = record.offset,
                        .record = stored_record(record),
                        .seal = record.seal});
    }
  }
  for (const auto& [number, entry] : wanted) {
    Segment& segment = *entry.first;
    TORPOR_RETURN_IF_ERROR(leases_.keep(segment.header, entry.second, into, [&] { return file_of(segment); }));
  }
  return leased;
}

}  // namespace torpor
