#include "base/uring_queue.h"

#include <algorithm>
#include <mutex>

#include <liburing.h>

namespace torpor {

struct UringQueue::Impl {
  std::mutex mutex;  // guards the ring
  io_uring ring{};
  unsigned depth = 0;
};

UringQueue::UringQueue(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
UringQueue::~UringQueue() { ::io_uring_queue_exit(&impl_->ring); }

std::unique_ptr<UringQueue> UringQueue::create(unsigned depth) {
  auto impl = std::make_unique<Impl>();
  if (::io_uring_queue_init(depth, &impl->ring, 0) != 0) return nullptr;
  impl->depth = depth;
  return std::unique_ptr<UringQueue>(new UringQueue(std::move(impl)));
}

void UringQueue::run(int fd, bool write, std::span<const FilePart> parts, std::span<int32_t> results) {
  const std::lock_guard lock(impl_->mutex);
  size_t begun = 0;
  size_t ended = 0;
  while (ended < parts.size()) {
    while (begun < parts.size() && begun - ended < impl_->depth) {
      io_uring_sqe* entry = ::io_uring_get_sqe(&impl_->ring);
      if (entry == nullptr) break;
      const FilePart& part = parts[begun];
      const auto bytes = static_cast<unsigned>(std::min<size_t>(part.bytes.size(), 1u << 30));
      if (write) {
        ::io_uring_prep_write(entry, fd, part.bytes.data(), bytes, part.offset);
      } else {
        ::io_uring_prep_read(entry, fd, part.bytes.data(), bytes, part.offset);
      }
      ::io_uring_sqe_set_data64(entry, begun++);
    }
    // An error of submitting (EINTR, EAGAIN) leaves entries in the ring; the next round submits them.
    ::io_uring_submit_and_wait(&impl_->ring, 1);
    io_uring_cqe* done = nullptr;
    while (::io_uring_peek_cqe(&impl_->ring, &done) == 0 && done != nullptr) {
      results[::io_uring_cqe_get_data64(done)] = done->res;
      ::io_uring_cqe_seen(&impl_->ring, done);
      ++ended;
    }
  }
}

}  // namespace torpor
