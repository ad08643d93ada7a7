// SPDX-License-Identifier: Apache-2.0
#include "offload/segment_leases.h"

#include <cerrno>

#include <fmt/core.h>

#include "base/log.h"

namespace torpor {

Status SegmentLeases::keep(const SegmentHeader& segment, std::span<const SegmentRecord> records, Directory& into,
                           const Opener& open) {
  const std::string name = leased_name(segment);
  const Status linked = directory_.link(segment.number, into, name);
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
  if (is_copy) {
    TORPOR_ASSIGN_OR_RETURN(const std::shared_ptr<File> from, open());
    return copy(*from, records, into, name);
  }
  // The name exists: either an earlier lease linked it, or it is another file.
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> there, into.open_file(name));
  ScratchPool::Lease scratch(scratch_);
  const std::span<std::byte> room = scratch->room(kPage);
  if (room.empty()) return no_memory_for(kPage);
  const std::span<std::byte> page = room.first(kPage);
  TORPOR_RETURN_IF_ERROR(there->pread(page, 0));
  const Result<OpenedHeader> header = read_header(page, key_);
  return header && header->header.id == segment.id ? ok() : linked;
}

// Copy the records to the same offsets, because seals bind the offset. The ranges between them take no disk space.
Status SegmentLeases::copy(const File& from, std::span<const SegmentRecord> records, Directory& into,
                           const std::string& name) {
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> to, into.open_slots(name, io_));
  ScratchPool::Lease scratch(scratch_);
  const auto copy_range = [&](uint64_t offset, uint64_t bytes) -> Status {
    const std::span<std::byte> room = scratch->room(bytes);
    if (room.empty()) return no_memory_for(bytes);
    TORPOR_RETURN_IF_ERROR(from.pread(room.first(bytes), offset));
    return to->pwrite(room.first(bytes), offset);
  };
  TORPOR_RETURN_IF_ERROR(copy_range(0, kPage));
  for (const SegmentRecord& record : records) {
    TORPOR_RETURN_IF_ERROR(copy_range(record.offset, align_up(record.stored, kPage)));
    const MutexLock lock(mutex_);
    copied_bytes_ += record.stored;
  }
  return to->sync();
}

uint64_t SegmentLeases::copied_bytes() const {
  const MutexLock lock(mutex_);
  return copied_bytes_;
}

}  // namespace torpor
