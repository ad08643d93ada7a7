// SPDX-License-Identifier: Apache-2.0
// ManualClock: a clock that stops until a test advances it. Threads: any.
#pragma once

#include <atomic>

#include "base/clock.h"

namespace torpor::test {

class ManualClock final : public Clock {
 public:
  std::chrono::nanoseconds now() const override { return std::chrono::nanoseconds(now_); }
  double unix_seconds() const override { return 0; }
  void advance(std::chrono::nanoseconds by) { now_ += by.count(); }

 private:
  std::atomic<int64_t> now_ = 1;
};

}  // namespace torpor::test
