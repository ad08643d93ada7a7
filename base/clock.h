// SPDX-License-Identifier: Apache-2.0
// Clock: time as a dependency. `now()` is monotonic (for durations and deadlines), `unix_seconds()` is wall time (for
// records).
#pragma once

#include <chrono>

namespace torpor {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual std::chrono::nanoseconds now() const = 0;
  virtual double unix_seconds() const = 0;
};

// Return the machine's clocks. They live for the whole process. Safe from any thread.
const Clock& system_clock();

// UnsteppedClock: wall time that advances evenly from the moment of construction, even if the machine's wall clock is
// set meanwhile. Use it for ages. `clock` supplies the monotonic time and must outlive this object.
class UnsteppedClock final : public Clock {
 public:
  explicit UnsteppedClock(const Clock& clock) : clock_(clock), wall_(clock.unix_seconds()), at_(clock.now()) {}
  std::chrono::nanoseconds now() const override { return clock_.now(); }
  double unix_seconds() const override { return wall_ + std::chrono::duration<double>(clock_.now() - at_).count(); }

 private:
  const Clock& clock_;
  const double wall_;
  const std::chrono::nanoseconds at_;
};

// Return the seconds between two values of `now()`.
inline double seconds_between(std::chrono::nanoseconds from, std::chrono::nanoseconds to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace torpor
