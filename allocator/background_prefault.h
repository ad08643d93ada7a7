// SPDX-License-Identifier: Apache-2.0
// BackgroundPrefault: prefaults memory that an arena may need later, while the engine works and must not notice. It
// rests for three quarters of the time, and stops when the system has no memory to spare.
//
// A thread of the lowest priority touches the pages. Another thread of normal priority pins them, in small pieces:
// other calls of the device's driver wait for a pin, so the pinning thread must not be held up.
//
// Owner: the owner of the arena; the arena must outlive it. Threads: any. Failure: memory that it cannot get is left to
// the call that needs it.
#pragma once

#include <cstdint>
#include <functional>
#include <thread>

#include "allocator/host_arena.h"
#include "base/mutex.h"

namespace torpor {

class BackgroundPrefault {
 public:
  // Returns how many bytes may be taken from the system now. Called before each huge page, on the background thread.
  using Headroom = std::function<uint64_t()>;
  // `waits`: do nothing before start().
  BackgroundPrefault(HostArena& arena, Headroom headroom, bool waits = false)
      : arena_(arena), headroom_(std::move(headroom)), waits_(waits) {}
  ~BackgroundPrefault();

  // Begin with the bytes of want() so far.
  void start() noexcept;
  // Try to have at least `bytes` bytes held and unused. If there is no memory or no thread to spare, stop with what is
  // there, until the next call.
  void want(uint64_t bytes) noexcept;
  void end() noexcept;   // begin nothing more and return at once; memory that is there stays
  void wait() noexcept;  // until no work is under way: done, short of memory, ended, or not started

 private:
  class Toucher;
  void begin() TORPOR_REQUIRES(mutex_);
  void run() noexcept;

  HostArena& arena_;
  const Headroom headroom_;
  Mutex mutex_;  // not held while memory is prefaulted
  CondVar changed_;
  uint64_t wanted_ TORPOR_GUARDED_BY(mutex_) = 0;
  bool waits_ TORPOR_GUARDED_BY(mutex_) = false;
  bool running_ TORPOR_GUARDED_BY(mutex_) = false;
  bool ended_ TORPOR_GUARDED_BY(mutex_) = false;
  std::thread thread_ TORPOR_GUARDED_BY(mutex_);  // joined by the next begin(), or by the destructor
};

}  // namespace torpor
