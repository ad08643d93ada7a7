// SPDX-License-Identifier: Apache-2.0
#include "offload/segment_store.h"

#include <algorithm>
#include <cstring>

#include <fmt/core.h>

#include "base/log.h"
#include "offload/segment.h"

namespace torpor {
namespace {

constexpr uint64_t kSegmentBytes = 64 * kMiB;
constexpr uint64_t kMostRecordBytes = kGiB;

int32_t slots_of(const SegmentStoreOptions& options) {
  if (options.slots_per_segment != 0) return options.slots_per_segment;
  return static_cast<int32_t>(std::max<uint64_t>(kSegmentBytes / align_up(options.record_bytes, kPage), 1));
}

Status check(const SegmentStoreOptions& options) {
  TORPOR_RETURN_IF_ERROR(options.compression.validate());
  if (options.record_bytes < 1 || options.record_bytes > kMostRecordBytes || options.slots_per_segment < 0 ||
      options.slots_per_segment > 65'536 || options.rank < 0 || options.open_files < 1) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("records of {} bytes, {} in a segment, rank {}, {} open files",
                                     options.record_bytes, options.slots_per_segment, options.rank, options.open_files),
                 .next_step = "use 1 byte to 1 GiB, at most 65536, a rank from 0 and at least 1"};
  }
  if (options.encrypt && options.key == nullptr)
    return Error{.code = Code::kInvalidArgument, .what = "encrypt is on, and there is no key", .next_step = "give one"};
  return ok();
}

Error no_more_numbers(const std::string& path) {
  return Error{.code = Code::kResourceExhausted,
               .what = fmt::format("{} has used up its numbers of segments", path),
               .next_step = "remove what is in it"};
}

uint64_t number_behind(const std::vector<uint64_t>& numbers) { return numbers.empty() ? 0 : numbers.back() + 1; }

// Return the numbers of the segments in the directory, ascending. Check that there are numbers left, and that the disk
// has space for the rest of the budget.
Result<std::vector<uint64_t>> look_around(SegmentDirectory& directory, uint64_t budget_bytes) {
  TORPOR_ASSIGN_OR_RETURN(SegmentDirectory::Content content, directory.content());
  if (number_behind(content.numbers) > kMostSegmentNumber) return no_more_numbers(directory.path());
  if (budget_bytes == 0) return std::move(content.numbers);
  TORPOR_ASSIGN_OR_RETURN(const uint64_t free, directory.free_bytes());
  if (free + content.bytes >= budget_bytes) return std::move(content.numbers);
  return Error{.code = Code::kResourceExhausted,
               .what = fmt::format("{} has room for {} bytes of blocks, {} are wanted", directory.path(),
                                   free + content.bytes, budget_bytes),
               .next_step = "free disk space, choose another directory or use a smaller budget"};
}

}  // namespace

SegmentStore::SegmentStore(std::unique_ptr<SegmentDirectory> directory, SegmentStoreOptions options, const Clock& clock,
                           std::vector<uint64_t> at_the_start)
    : options_(std::move(options)),
      traits_{.kind = "disk",
              .durable = true,
              .record_bytes = options_.record_bytes,
              .slots_per_segment = slots_of(options_)},
      capacity_(most_bytes_of_segment(options_)),
      directory_(std::move(directory)),
      clock_(clock),
      at_the_start_(std::move(at_the_start)),
      first_number_(number_behind(at_the_start_)),
      leases_(*directory_, scratch_, options_.key.get(), options_.io),
      segments_({.rank = options_.rank,
                 .slots = traits_.slots_per_segment,
                 .capacity = capacity_,
                 .budget_bytes = options_.budget_bytes,
                 .first_number = first_number_,
                 .key = options_.key,
                 .encrypt = options_.encrypt}) {}

SegmentStore::~SegmentStore() = default;

// Assumes that each record is in a batch of its own, and as far behind the one before as its alignment may need.
uint64_t SegmentStore::most_bytes_of_segment(const SegmentStoreOptions& options) {
  const uint64_t record = align_up(options.record_bytes, kPage) + (options.record_bytes >= kMiB ? kMiB : 0);
  const uint64_t most = kPage + static_cast<uint64_t>(slots_of(options)) * (kPage + record);
  return align_up(most, granularity_of(most));
}

Result<std::unique_ptr<SegmentStore>> SegmentStore::open(FileSystem& file_system, const std::string& path,
                                                         SegmentStoreOptions options, const Clock& clock) {
  TORPOR_RETURN_IF_ERROR(check(options));
  TORPOR_ASSIGN_OR_RETURN(
      std::unique_ptr<SegmentDirectory> directory,
      SegmentDirectory::open(file_system, fmt::format("{}/r{}", path, options.rank), options.lock_wait));
  TORPOR_ASSIGN_OR_RETURN(std::vector<uint64_t> numbers, look_around(*directory, options.budget_bytes));
  return std::unique_ptr<SegmentStore>(
      new SegmentStore(std::move(directory), std::move(options), clock, std::move(numbers)));
}

void SegmentStore::open_space(uint32_t space, const Digest& digest) {
  const MutexLock lock(mutex_);
  segments_.open_space(space, digest);
}

// ---- segments

// Return the open segment with this number; begin it if there is none.
Result<SegmentPtr> SegmentStore::writable(uint64_t number, uint32_t space) {
  if (number > kMostSegmentNumber) return no_more_numbers(directory_->path());
  SegmentPtr segment;
  {
    const MutexLock lock(mutex_);
    for (SegmentPtr found = segments_.find(number); found != nullptr; found = segments_.find(number)) {
      if (found->state == Segment::State::kMaking) {
        changed_.wait(mutex_);
        continue;
      }
      if (found->state != Segment::State::kOpen) return segment_closed(number);
      if (found->space == space) return found;
      return Error{.code = Code::kInvalidArgument,
                   .what = fmt::format("{} has keys of another namespace", segment_name(number)),
                   .next_step = "use slots of a new segment for a new namespace"};
    }
    TORPOR_ASSIGN_OR_RETURN(segment, segments_.begin(number, space));
  }
  Status made = try_catch([&] { return make_file(*segment); });
  {
    const MutexLock lock(mutex_);
    if (made && segment->state == Segment::State::kGone) made = segment_closed(number);  // dropped meanwhile
    if (made) {
      changed_.notify_all();
      segments_.open(*segment);
      return segment;
    }
  }
  // Removes the file by its name, so no thread may begin this segment anew before the file is gone. Threads that wait
  // for the segment go on waiting.
  directory_->remove(number);
  std::shared_ptr<File> closing;
  const MutexLock lock(mutex_);
  changed_.notify_all();
  closing = segments_.cancel(segment);
  return made.error();
}

Status SegmentStore::make_file(Segment& segment) {
  TORPOR_ASSIGN_OR_RETURN(std::shared_ptr<File> file, directory_->create(segment.header.number, options_.io));
  TORPOR_RETURN_IF_ERROR(file->preallocate(capacity_));
  ScratchPool::Lease scratch(scratch_);
  const std::span<std::byte> room = scratch->room(kPage);
  if (room.empty()) return no_memory_for(kPage);
  const std::span<std::byte> page = room.first(kPage);  // `room` may be larger
  write_header(page, segment.header, segment.seal.get());
  TORPOR_RETURN_IF_ERROR(file->pwrite(page, 0));
  const MutexLock lock(mutex_);
  health_.io = file->io();
  segment.file = std::move(file);
  return ok();
}

// ---- health

void SegmentStore::note(const Error& error, bool write) {
  const MutexLock lock(mutex_);
  ++(write ? health_.write_errors : health_.read_errors);
  health_.reason = error.to_string();
  if (!write) return;  // a block that cannot be read is a miss; others may be readable
  if (!health_.degraded)
    log().warn("blocks on disk: {}; trying again in {} ms", health_.reason, options_.retry_interval.count());
  health_.degraded = true;
  failed_at_ = clock_.now();
}

bool SegmentStore::accepting() const {
  const MutexLock lock(mutex_);
  return !health_.degraded || clock_.now() >= failed_at_ + options_.retry_interval;
}

StoreHealth SegmentStore::health() const {
  const uint64_t copied = leases_.copied_bytes();
  const MutexLock lock(mutex_);
  StoreHealth now = health_;
  now.held_bytes = segments_.held_bytes();
  now.dropped_bytes = segments_.dropped_bytes();
  now.copied_bytes = copied;
  return now;
}

}  // namespace torpor
