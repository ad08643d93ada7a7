// SPDX-License-Identifier: Apache-2.0
#include "base/uring_queue.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <liburing.h>

#include "base/mutex.h"

namespace torpor {
namespace {

constexpr int kMostTries = 1000;  // to submit while the kernel is short of memory and nothing is under way

}  // namespace

struct UringQueue::Impl {
  explicit Impl(unsigned entries) : depth(entries) { usable = ::io_uring_queue_init(depth, &ring, 0) == 0; }
  ~Impl() { close(); }
  void close() TORPOR_REQUIRES(mutex) {
    if (std::exchange(usable, false)) ::io_uring_queue_exit(&ring);
  }
  // Make a new ring. Entries that were prepared but not submitted must never be submitted later: callers own their
  // memory.
  void start_anew() TORPOR_REQUIRES(mutex) {
    close();
    usable = ::io_uring_queue_init(depth, &ring, 0) == 0;
  }
  const unsigned depth;
  Mutex mutex;
  io_uring ring TORPOR_GUARDED_BY(mutex){};
  bool usable TORPOR_GUARDED_BY(mutex) = false;
};

UringQueue::UringQueue(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
UringQueue::~UringQueue() = default;

std::unique_ptr<UringQueue> UringQueue::create(unsigned depth) {
  auto impl = std::make_unique<Impl>(depth);
  {
    const MutexLock lock(impl->mutex);
    if (!impl->usable) return nullptr;
  }
  return std::unique_ptr<UringQueue>(new UringQueue(std::move(impl)));
}

void UringQueue::run(int fd, bool write, std::span<const FilePart> parts, std::span<int32_t> results) {
  const MutexLock lock(impl_->mutex);
  io_uring& ring = impl_->ring;
  std::fill(results.begin(), results.end(), -EAGAIN);
  size_t prepared = 0;
  size_t ended = 0;
  int under_way = 0;
  int tries = 0;
  while (impl_->usable && ended < parts.size()) {
    while (prepared < parts.size() && prepared - ended < impl_->depth) {
      io_uring_sqe* entry = ::io_uring_get_sqe(&ring);
      if (entry == nullptr) break;
      const FilePart& part = parts[prepared];
      const auto bytes = static_cast<unsigned>(std::min<size_t>(part.bytes.size(), 1u << 30));
      if (write) {
        ::io_uring_prep_write(entry, fd, part.bytes.data(), bytes, part.offset);
      } else {
        ::io_uring_prep_read(entry, fd, part.bytes.data(), bytes, part.offset);
      }
      ::io_uring_sqe_set_data64(entry, prepared++);
    }
    const int submitted = ::io_uring_submit(&ring);
    under_way += std::max(submitted, 0);
    if (under_way == 0) {
      if ((submitted == -EINTR || submitted == -EAGAIN || submitted == -EBUSY) && ++tries < kMostTries) continue;
      return impl_->start_anew();  // nothing is under way; the caller finishes entries without a result
    }
    io_uring_cqe* done = nullptr;
    if (::io_uring_wait_cqe(&ring, &done) != 0) continue;  // interrupted
    do {
      results[::io_uring_cqe_get_data64(done)] = done->res;
      ::io_uring_cqe_seen(&ring, done);
      ++ended;
      --under_way;
    } while (::io_uring_peek_cqe(&ring, &done) == 0 && done != nullptr);
  }
}

}  // namespace torpor
