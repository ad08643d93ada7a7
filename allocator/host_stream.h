// SPDX-License-Identifier: Apache-2.0
// HostStream: a stream of HostDevice. Threads: any.
#pragma once

#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include <fmt/core.h>

#include "allocator/device_memory.h"
#include "allocator/prefault.h"
#include "base/copy.h"
#include "base/mutex.h"
#include "base/units.h"

namespace torpor {

// Runs calls in order, on a thread of its own, or, if `deferred`, on the thread that waits.
class HostStream {
 public:
  // The stream calls this after a call that copied to the device below so many bytes per second, with an address that
  // it copied to.
  struct OnSlow {
    uint64_t bytes_per_second = 0;
    std::function<void(DeviceAddress)> call;  // null: nothing
  };

  HostStream(bool deferred, uint64_t link_bytes_per_second, OnSlow on_slow)
      : deferred_(deferred), link_bytes_per_second_(link_bytes_per_second), on_slow_(std::move(on_slow)) {}
  ~HostStream() {
    if (deferred_) {
      (void)drain(enqueued());
    } else if (worker_.joinable()) {
      {
        const MutexLock lock(mutex_);
        ending_ = true;
      }
      changed_.notify_all();
      worker_.join();  // it first runs the calls that are queued
    }
  }

  // Start the thread. Call it unless the stream is deferred. kResourceExhausted: the system gives no thread.
  Status start() {
    try {
      worker_ = std::thread([this] { run(); });
      return ok();
    } catch (const std::exception& error) {
      return Error{.code = Code::kResourceExhausted,
                   .what = fmt::format("a stream of the host device needs a thread: {}", error.what()),
                   .next_step = "raise the limit of threads, or end some",
                   .origin = Origin::kSystem};
    }
  }

  void enqueue(Direction direction, std::vector<Copy> copies) {
    {
      const MutexLock lock(mutex_);
      queue_.push_back({direction, std::move(copies)});
      ++enqueued_;
    }
    changed_.notify_all();
  }

  uint64_t enqueued() const {
    const MutexLock lock(mutex_);
    return enqueued_;
  }

  // Return when the first `count` calls since construction are done. Error: a copy threw.
  DrainResult drain(uint64_t count) {
    const MutexLock lock(mutex_);
    while (done_ < count) {
      if (deferred_ && !queue_.empty()) {
        run_one();
      } else {
        changed_.wait(mutex_);
      }
    }
    if (!failed_) return {};
    return {Drain::kDrainedWithError,
            Error{.code = Code::kDevice, .what = "a copy of the host device failed", .origin = Origin::kDevice}};
  }

 private:
  struct Call {
    Direction direction;
    std::vector<Copy> copies;
  };

  void run() {
    const MutexLock lock(mutex_);
    while (true) {
      while (!ending_ && queue_.empty()) changed_.wait(mutex_);
      if (queue_.empty()) return;
      run_one();
    }
  }

  // Run the first call of the queue. Precondition: the queue is not empty. Releases the lock while it copies.
  void run_one() TORPOR_REQUIRES(mutex_) {
    const Call call = std::move(queue_.front());
    queue_.pop_front();
    mutex_.unlock();
    const Status copied = try_catch([&] {
      uint64_t bytes = 0;
      for (const Copy& copy : call.copies) bytes += copy.bytes;
      BulkCopy bulk(bytes);
      const auto began = std::chrono::steady_clock::now();
      for (const Copy& copy : call.copies) carry_out(call.direction, copy, bulk);
      if (!on_slow_.call || call.direction != Direction::kHostToDevice || bytes < kHugePage) return ok();
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - began;
      if (static_cast<double>(bytes) < static_cast<double>(on_slow_.bytes_per_second) * taken.count())
        on_slow_.call(call.copies.back().device);
      return ok();
    });
    mutex_.lock();
    failed_ = failed_ || !copied;
    ++done_;
    changed_.notify_all();
  }

  static constexpr uint64_t kPopulated = 64 * kKiB;  // below, a call costs as much as the page faults that it saves

  void carry_out(Direction direction, const Copy& copy, BulkCopy& bulk) const {
    const auto began =
        link_bytes_per_second_ == 0 ? std::chrono::steady_clock::time_point() : std::chrono::steady_clock::now();
    auto* device = reinterpret_cast<std::byte*>(copy.device);  // NOLINT(performance-no-int-to-ptr)
    const bool down = direction == Direction::kDeviceToHost;
    const std::span<std::byte> to(down ? copy.host : device, copy.bytes);
    const std::span<const std::byte> from(down ? device : copy.host, copy.bytes);
    if (!down && copy.bytes >= kPopulated) populate(device, copy.bytes);
    if (copy.digest != nullptr) {
      bulk.copy(to, from, *copy.digest);
    } else {
      bulk.copy(to, from);
    }
    if (link_bytes_per_second_ == 0) return;
    const double seconds = static_cast<double>(copy.bytes) / static_cast<double>(link_bytes_per_second_);
    std::this_thread::sleep_until(
        began + std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds)));
  }

  const bool deferred_;
  const uint64_t link_bytes_per_second_;
  const OnSlow on_slow_;
  std::thread worker_;
  mutable Mutex mutex_;  // not held while bytes are copied
  CondVar changed_;
  std::deque<Call> queue_ TORPOR_GUARDED_BY(mutex_);
  uint64_t enqueued_ TORPOR_GUARDED_BY(mutex_) = 0;
  uint64_t done_ TORPOR_GUARDED_BY(mutex_) = 0;
  bool failed_ TORPOR_GUARDED_BY(mutex_) = false;
  bool ending_ TORPOR_GUARDED_BY(mutex_) = false;
};

}  // namespace torpor
