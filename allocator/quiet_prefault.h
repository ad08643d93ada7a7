// QuietPrefault: memory for an arena that may be wanted later, brought up beside work that must not notice: on one
// thread of the lowest priority, which rests three quarters of the time, and only as long as the system has room for
// it.
//
// Owner: who has the arena, which outlives it. Threads: any.
#pragma once

#include <cstdint>
#include <functional>
#include <thread>

#include "allocator/host_arena.h"
#include "base/mutex.h"

namespace torpor {

class QuietPrefault {
 public:
  // `room`: how many bytes may be taken from the system now; asked before each huge page, on the thread.
  using Room = std::function<uint64_t()>;
  QuietPrefault(HostArena& arena, Room room) : arena_(arena), room_(std::move(room)) {}
  ~QuietPrefault();

  // At least so many bytes held and not in use. Where there is no room, or no thread to be had, it is left at what
  // there is, until the next call.
  void want(uint64_t bytes) noexcept;
  void end() noexcept;   // begins nothing more; what is there stays. Waits for nobody
  void wait() noexcept;  // until it has what is wanted, or no room, or was ended

 private:
  void run() noexcept;

  HostArena& arena_;
  const Room room_;
  Mutex mutex_;  // not held while memory is brought up
  CondVar changed_;
  uint64_t wanted_ TORPOR_GUARDED_BY(mutex_) = 0;
  bool running_ TORPOR_GUARDED_BY(mutex_) = false;
  bool ended_ TORPOR_GUARDED_BY(mutex_) = false;
  std::thread thread_ TORPOR_GUARDED_BY(mutex_);  // joined by the next one, or the end
};

}  // namespace torpor
