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

}  // namespace

SegmentStore::SegmentStore(std::unique_ptr<SegmentDirectory> directory, SegmentStoreOptions options, const Clock& clock)
    : options_(std::move(options)),
      traits_{.kind = "disk",
              .durable = true,
              .record_bytes = options_.record_bytes,
              .slots_per_segment = slots_of(options_)},
      capacity_(most_bytes_of_segment(options_)),
      directory_(std::move(directory)),
      clock_(clock) {}

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
  std::unique_ptr<SegmentStore> store(new SegmentStore(std::move(directory), std::move(options), clock));
  TORPOR_RETURN_IF_ERROR(store->look_around());
  return store;
}

// List the segments in the directory, and check that the disk has space for the rest of the budget.
Status SegmentStore::look_around() {
  TORPOR_ASSIGN_OR_RETURN(SegmentDirectory::Content content, directory_->content());
  at_the_start_ = std::move(content.numbers);
  if (!at_the_start_.empty()) first_number_ = at_the_start_.back() + 1;
  if (first_number_ > kMostSegmentNumber) return no_more_numbers();
  if (options_.budget_bytes == 0) return ok();
  TORPOR_ASSIGN_OR_RETURN(const uint64_t free, directory_->free_bytes());
  if (free + content.bytes >= options_.budget_bytes) return ok();
  return Error{.code = Code::kResourceExhausted,
               .what = fmt::format("{} has room for {} bytes of blocks, {} are wanted", directory_->path(),
                                   free + content.bytes, options_.budget_bytes),
               .next_step = "free disk space, choose another directory or use a smaller budget"};
}

Error SegmentStore::no_more_numbers() const {
  return Error{.code = Code::kResourceExhausted,
               .what = fmt::format("{} has used up its numbers of segments", directory_->path()),
               .next_step = "remove what is in it"};
}

void SegmentStore::open_space(uint32_t space, const Digest& digest) {
  const MutexLock lock(mutex_);
  spaces_[space] = digest;
}

// ---- segments

// Return the open segment with this number; begin it if there is none.
Result<SegmentStore::SegmentPtr> SegmentStore::writable(uint64_t number, uint32_t space) {
  SegmentPtr segment;
  {
    const MutexLock lock(mutex_);
    for (auto found = segments_.find(number); found != segments_.end(); found = segments_.find(number)) {
      if (found->second->state == Segment::State::kMaking) {
        changed_.wait(mutex_);
        continue;
      }
      if (found->second->state != Segment::State::kOpen) return segment_closed(number);
      if (found->second->space == space) return found->second;
      return Error{.code = Code::kInvalidArgument,
                   .what = fmt::format("{} has keys of another namespace", segment_name(number)),
                   .next_step = "use slots of a new segment for a new namespace"};
    }
    TORPOR_ASSIGN_OR_RETURN(segment, begin_segment(number, space));
  }
  Status made = try_catch([&] { return make_file(*segment); });
  {
    const MutexLock lock(mutex_);
    if (made && segment->state == Segment::State::kGone) made = segment_closed(number);  // dropped meanwhile
    if (made) {
      changed_.notify_all();
      segment->state = Segment::State::kOpen;
      newest_ = std::max(newest_, number);
      end_older();
      return segment;
    }
  }
  // Removes the file by its name, so no thread may begin this segment anew before the file is gone. Threads that wait
  // for the segment go on waiting.
  directory_->remove(number);
  std::shared_ptr<File> closing;
  const MutexLock lock(mutex_);
  const bool dropped = segment->state == Segment::State::kGone;
  closing = forget(*segment);
  std::erase(unfinished_, segment);
  if (!dropped) segments_.erase(number);  // else remove_queued() removes a file of this name once more
  return made.error();
}

Result<SegmentStore::SegmentPtr> SegmentStore::begin_segment(uint64_t number, uint32_t space) {
  const auto digest = spaces_.find(space);
  if (number < first_number_ || number + kOpenSegments <= newest_) return segment_closed(number);
  if (number > kMostSegmentNumber) return no_more_numbers();
  if (digest == spaces_.end()) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("namespace {} was not opened", space),
                 .next_step = "open it first"};
  }
  if (options_.budget_bytes != 0 && health_.held_bytes + capacity_ > options_.budget_bytes) {
    return Error{.code = Code::kResourceExhausted,
                 .what = fmt::format("{} bytes of segments are there, a budget of {} has no room for {} more",
                                     health_.held_bytes, options_.budget_bytes, capacity_),
                 .next_step = "drop a segment, or use a larger budget"};
  }
  auto segment = std::make_shared<Segment>();
  segment->header = header_of(number, digest->second);
  segment->header.id = random_seal_id();
  if (options_.key != nullptr) {
    segment->seal = std::make_shared<Seal>(*options_.key, segment->header.id, segment->header.protection);
    segment->header.key_name = segment->seal->key_name();
  }
  segment->space = space;
  segment->places.resize(static_cast<size_t>(traits_.slots_per_segment));
  unfinished_.push_back(segment);
  segments_.emplace(number, segment);
  segment->reserved = capacity_;
  health_.held_bytes += capacity_;
  return segment;
}

SegmentHeader SegmentStore::header_of(uint64_t number, const Digest& space) const {
  return {.number = number,
          .rank = options_.rank,
          .slots = traits_.slots_per_segment,
          .space = space,
          .protection = options_.key == nullptr ? Protection::kNone
                        : options_.encrypt      ? Protection::kEncrypted
                                                : Protection::kAuthenticated};
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

// End segments that are kOpenSegments behind the newest, and forget those of them that were dropped.
void SegmentStore::end_older() {
  for (const SegmentPtr& segment : unfinished_) {
    if (segment->state == Segment::State::kOpen && segment->header.number + kOpenSegments <= newest_)
      segment->state = Segment::State::kEnded;
  }
  std::erase_if(segments_, [newest = newest_](const auto& entry) {
    return entry.second->state == Segment::State::kGone && entry.first + kOpenSegments <= newest;
  });
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
  const MutexLock lock(mutex_);
  return health_;
}

}  // namespace torpor
