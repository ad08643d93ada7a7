// SPDX-License-Identifier: Apache-2.0
// Breaker: after a number of failures in a row, it stops requests to a server for a pause, so that no caller waits for
// a server that is gone. Then one caller may try; if that fails, the next pause is twice as long. Any success closes
// the breaker.
//
// Threads: all methods from any thread.
#pragma once

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/clock.h"
#include "base/mutex.h"

namespace torpor::remote {

struct BreakerOptions {
  int failures = 3;  // in a row
  std::chrono::nanoseconds first_pause = std::chrono::seconds(1);
  std::chrono::nanoseconds longest_pause = std::chrono::seconds(30);
};

class Breaker {
 public:
  Breaker(const Clock& clock, BreakerOptions options) : clock_(clock), options_(options), pause_(options.first_pause) {}

  // Return whether the caller may make a request now. If so, it calls succeeded() or failed() afterwards; neither, if
  // the answer does not say whether the store works. While the breaker is open, one caller may at the end of each
  // pause.
  bool may_ask() {
    const MutexLock lock(mutex_);
    if (!open_) return true;
    if (clock_.now() < until_) return false;
    until_ = clock_.now() + pause_;
    return trying_ = true;
  }
  // Return whether may_ask() would return true; reserves nothing.
  bool closed_or_due() const {
    const MutexLock lock(mutex_);
    return !open_ || clock_.now() >= until_;
  }
  bool succeeded() {  // returns true if that closed the breaker
    const MutexLock lock(mutex_);
    in_a_row_ = 0;
    pause_ = options_.first_pause;
    trying_ = false;
    return std::exchange(open_, false);
  }
  bool failed() {  // returns true if that opened the breaker
    const MutexLock lock(mutex_);
    if (open_ && !std::exchange(trying_, false)) return false;  // its request began before the breaker opened
    if (!open_ && ++in_a_row_ < options_.failures) return false;
    if (open_) pause_ = std::min(2 * pause_, options_.longest_pause);
    until_ = clock_.now() + pause_;
    return !std::exchange(open_, true);
  }

 private:
  const Clock& clock_;
  const BreakerOptions options_;
  mutable Mutex mutex_;
  bool open_ TORPOR_GUARDED_BY(mutex_) = false;
  bool trying_ TORPOR_GUARDED_BY(mutex_) = false;  // one caller tries while it is open
  int in_a_row_ TORPOR_GUARDED_BY(mutex_) = 0;
  std::chrono::nanoseconds pause_ TORPOR_GUARDED_BY(mutex_);
  std::chrono::nanoseconds until_ TORPOR_GUARDED_BY(mutex_){};
};

}  // namespace torpor::remote
