// SPDX-License-Identifier: Apache-2.0
// Breaker: after so many failures in a row nothing is asked of a server for a while, so that nobody waits for one that
// is gone. Then one may try; if that fails too, the while is twice as long. Any answer closes it again.
//
// Threads: all methods from any.
#pragma once

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/clock.h"
#include "base/mutex.h"

namespace torpor::remote {

struct BreakerOptions {
  int failures = 3;
  std::chrono::nanoseconds first_pause = std::chrono::seconds(1);
  std::chrono::nanoseconds longest_pause = std::chrono::seconds(30);
};

class Breaker {
 public:
  Breaker(const Clock& clock, BreakerOptions options) : clock_(clock), options_(options), pause_(options.first_pause) {}

  // Whether to ask now; who may says with succeeded() or failed() how it ended. While it is open, of several one may.
  bool may_ask() {
    const MutexLock lock(mutex_);
    if (!open_) return true;
    if (clock_.now() < until_) return false;
    until_ = clock_.now() + pause_;
    return trying_ = true;
  }
  // The same, and nobody asks.
  bool closed_or_due() const {
    const MutexLock lock(mutex_);
    return !open_ || clock_.now() >= until_;
  }
  bool succeeded() {  // whether that closed it
    const MutexLock lock(mutex_);
    in_a_row_ = 0;
    pause_ = options_.first_pause;
    trying_ = false;
    return std::exchange(open_, false);
  }
  bool failed() {  // whether that opened it
    const MutexLock lock(mutex_);
    if (open_ && !std::exchange(trying_, false)) return false;  // it was asked before it was open
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
  bool trying_ TORPOR_GUARDED_BY(mutex_) = false;  // one asks although it is open
  int in_a_row_ TORPOR_GUARDED_BY(mutex_) = 0;
  std::chrono::nanoseconds pause_ TORPOR_GUARDED_BY(mutex_);
  std::chrono::nanoseconds until_ TORPOR_GUARDED_BY(mutex_){};
};

}  // namespace torpor::remote
