// SPDX-License-Identifier: Apache-2.0
// TwoClocks: monotonic and wall time, which stop until a test advances them. Threads: any.
#pragma once

#include <atomic>

#include "base/clock.h"

namespace torpor::test {

class TwoClocks final : public Clock {
 public:
  std::chrono::nanoseconds now() const override { return std::chrono::nanoseconds(now_); }
  double unix_seconds() const override { return static_cast<double>(wall_) / 1e9; }
  void advance(std::chrono::nanoseconds by) {
    now_ += by.count();
    set_wall(by);
  }
  // Set the wall clock forward, or back, as its owner may.
  void set_wall(std::chrono::nanoseconds by) { wall_ += by.count(); }

 private:
  std::atomic<int64_t> now_ = 1;
  std::atomic<int64_t> wall_ = 1'800'000'000'000'000'000;
};

}  // namespace torpor::test
