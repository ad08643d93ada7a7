// SPDX-License-Identifier: Apache-2.0
#include "allocator/shared_capacity.h"

#include <algorithm>
#include <cerrno>

#include <fcntl.h>

#include <fmt/core.h>

#include "base/log.h"

namespace torpor {
namespace {

struct flock lock_of(uint64_t begin, uint64_t bytes, short type) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(begin);
  lock.l_len = static_cast<off_t>(bytes);
  return lock;
}

uint64_t sum(const auto& ranges) {
  uint64_t bytes = 0;
  for (const auto& range : ranges) bytes += range.bytes();
  return bytes;
}

}  // namespace

Result<std::unique_ptr<SharedCapacity>> SharedCapacity::open(const std::string& file, uint64_t bytes) {
  const std::string what = fmt::format("cannot open {}", file);
  TORPOR_ASSIGN_OR_RETURN(Descriptor opened,
                          guarded(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600), what));
  return std::unique_ptr<SharedCapacity>(new SharedCapacity(std::move(opened), bytes));
}

// The byte behind the capacity keeps others from taking at the same time.
class SharedCapacity::Turn {
 public:
  static Status begin(const SharedCapacity& of) { return of.lock(turn(of), F_WRLCK, F_OFD_SETLKW); }
  explicit Turn(const SharedCapacity& of) : of_(of) {}
  ~Turn() { (void)of_.lock(turn(of_), F_UNLCK, F_OFD_SETLK); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  static Range turn(const SharedCapacity& of) { return {of.bytes_, of.bytes_ + 1}; }
  const SharedCapacity& of_;
};

Status SharedCapacity::take(uint64_t bytes) {
  const MutexLock guard(mutex_);
  TORPOR_RETURN_IF_ERROR(Turn::begin(*this));
  const Turn turn(*this);
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Range> free, free_ranges());
  if (const uint64_t all = sum(free); all < bytes) {
    return Error{.code = Code::kResourceExhausted,
                 .what = fmt::format("{} bytes of device memory wanted, {} of {} are free: other processes share it",
                                     bytes, all, bytes_),
                 .next_step = "free device memory and call again",
                 .origin = Origin::kDevice};
  }
  own_.reserve(own_.size() + free.size());  // nothing is allocated from here on
  uint64_t taken = 0;
  for (const Range& range : free) {
    if (taken == bytes) break;
    const Range part{range.begin, range.begin + std::min(bytes - taken, range.bytes())};
    if (Status locked = lock(part, F_WRLCK, F_OFD_SETLK); !locked) {
      release(taken);
      return locked;
    }
    own_.push_back(part);
    taken += part.bytes();
  }
  return ok();
}

void SharedCapacity::give_back(uint64_t bytes) {
  const MutexLock guard(mutex_);
  release(bytes);
}

std::optional<uint64_t> SharedCapacity::used_bytes() const {
  const MutexLock guard(mutex_);
  const Result<std::vector<Range>> free = free_ranges();
  return free ? std::optional(bytes_ - sum(*free)) : std::nullopt;
}

Status SharedCapacity::lock(Range range, short type, int command) const {
  struct flock lock = lock_of(range.begin, range.bytes(), type);
  while (::fcntl(file_.get(), command, &lock) != 0) {
    if (errno != EINTR) return system_error(errno, "cannot lock a range of the file of shared device memory");
  }
  return ok();
}

Status SharedCapacity::add_foreign(Range within, std::vector<Range>& found) const {
  if (within.begin >= within.end) return ok();
  struct flock lock = lock_of(within.begin, within.bytes(), F_WRLCK);
  if (::fcntl(file_.get(), F_OFD_GETLK, &lock) != 0)
    return system_error(errno, "cannot read the locks of the file of shared device memory");
  if (lock.l_type == F_UNLCK) return ok();
  // The kernel gives any lock that it finds. Length 0: up to the end of the file.
  const auto begin = static_cast<uint64_t>(lock.l_start);
  const uint64_t end = lock.l_len == 0 ? within.end : begin + static_cast<uint64_t>(lock.l_len);
  const Range taken{std::max(begin, within.begin), std::min(end, within.end)};
  found.push_back(taken);
  TORPOR_RETURN_IF_ERROR(add_foreign({within.begin, taken.begin}, found));
  return add_foreign({taken.end, within.end}, found);
}

Result<std::vector<SharedCapacity::Range>> SharedCapacity::free_ranges() const {
  std::vector<Range> taken = own_;
  TORPOR_RETURN_IF_ERROR(add_foreign({0, bytes_}, taken));
  std::ranges::sort(taken, {}, &Range::begin);
  std::vector<Range> free;
  uint64_t at = 0;
  for (const Range& range : taken) {
    if (range.begin > at) free.push_back({at, range.begin});
    at = range.end;
  }
  if (at < bytes_) free.push_back({at, bytes_});
  return free;
}

void SharedCapacity::release(uint64_t bytes) {
  while (bytes > 0) {
    Range& last = own_.back();
    const Range part{last.end - std::min(bytes, last.bytes()), last.end};
    if (const Status done = lock(part, F_UNLCK, F_OFD_SETLK); !done)
      log().error("device memory stays taken for other processes: {}", done.error());
    bytes -= part.bytes();
    last.end = part.begin;
    if (last.bytes() == 0) own_.pop_back();
  }
}

}  // namespace torpor
