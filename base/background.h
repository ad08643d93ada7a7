// SPDX-License-Identifier: Apache-2.0
// Background: one piece of work at a time on a thread of its own, for an owner that asks now and then whether it has
// ended. Without a thread the work is done when the owner asks, on its thread: for simulations that must replay
// exactly.
//
// Threads: all calls from one at a time. What `work` uses stays until it has ended; the destructor waits for that.
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

  // After what was begun before has ended. kResourceExhausted: there is no thread to be had. What `work` throws is its
  // error.
  Status begin(std::function<Status()> work);
  bool ended();  // nothing is under way any more, or was begun at all
  // Until then; how the last one ended: once.
  Status wait() {
    finish();
    return std::exchange(result_, ok());
  }

 private:
  void finish() noexcept;
  void run() noexcept;
  const bool own_thread_;
  std::function<Status()> work_;  // null: nothing is under way
  std::atomic<bool> running_ = false;
  Status result_;
  std::thread thread_;
};

}  // namespace torpor
