// SPDX-License-Identifier: Apache-2.0
// Background: runs one piece of work at a time on its own thread. The owner asks now and then whether the work has
// ended.
//
// Without a thread of its own, it does the work on the owner's thread, when the owner calls ended() or wait().
// Simulations use this, because they must replay exactly.
//
// Threads: one thread at a time may call the methods. Everything that `work` uses must stay alive until the work has
// ended; the destructor waits for that.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <utility>

#include "base/status.h"

namespace torpor {

class Background {
 public:
  explicit Background(bool own_thread) : own_thread_(own_thread) {}
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;
  ~Background() { finish(); }

  // Start `work`. Waits first until the previous work has ended, and drops its result. kResourceExhausted: the system
  // gives no thread. If `work` throws, wait() returns that as its error.
  Status begin(std::function<Status()> work);
  // Return whether no work is under way (also if none was ever started).
  bool ended();
  // Wait until the work has ended and return its result; each result is returned once, then ok().
  Status wait() {
    finish();
    return std::exchange(result_, ok());
  }

 private:
  void finish() noexcept;
  void run() noexcept;
  const bool own_thread_;
  std::function<Status()> work_;  // null: no work is under way
  std::atomic<bool> running_ = false;
  Status result_;
  std::thread thread_;
};

}  // namespace torpor
