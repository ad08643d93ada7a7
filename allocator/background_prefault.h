// SPDX-License-Identifier: Apache-2.0
// BackgroundPrefault: memory for an arena that may be wanted later, brought up beside work that must not notice: three
// quarters of the time nothing is done, and only as long as the system has room for it.
//
// Pages are touched by a thread of the lowest priority. Memory is pinned by another of normal priority, in small
// pieces: other calls of the device's driver wait for a pin, so who pins must not stand back for anybody.
//
// Owner: who has the arena, which outlives it. Threads: any. Failure: what cannot be had is left to who needs it.
#pragma once

#include <cstdint>
#include <functional>
#include <thread>

#include "allocator/host_arena.h"
#include "base/mutex.h"

namespace torpor {

class BackgroundPrefault {
 public:
  // `room`: how many bytes may be taken from the system now; asked before each huge page, on the thread.
  using Room = std::function<uint64_t()>;
  // `waits`: begins nothing before start().
  BackgroundPrefault(HostArena& arena, Room room, bool waits = false)
      : arena_(arena), room_(std::move(room)), waits_(waits) {}
  ~BackgroundPrefault();

  // Begin with what is wanted so far.
  void start() noexcept;
  // At least so many bytes held and not in use. Where there is no room, or no thread to be had, it is left at what
  // there is, until the next call.
  void want(uint64_t bytes) noexcept;
  void end() noexcept;   // begins nothing more; what is there stays. Waits for nobody
  void wait() noexcept;  // until it has what is wanted, or no room, or was ended, or waits itself

 private:
  class Toucher;
  void begin() TORPOR_REQUIRES(mutex_);
  void run() noexcept;

  HostArena& arena_;
  const Room room_;
  Mutex mutex_;  // not held while memory is brought up
  CondVar changed_;
  uint64_t wanted_ TORPOR_GUARDED_BY(mutex_) = 0;
  bool waits_ TORPOR_GUARDED_BY(mutex_) = false;
  bool running_ TORPOR_GUARDED_BY(mutex_) = false;
  bool ended_ TORPOR_GUARDED_BY(mutex_) = false;
  std::thread thread_ TORPOR_GUARDED_BY(mutex_);  // joined by the next one, or the end
};

}  // namespace torpor
