// Time as a dependency. `now()` is monotonic (for durations and deadlines), `unix_seconds()` is wall time (for
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

// The machine's clocks. Lives for the whole process; safe from any thread.
const Clock& system_clock();

// Seconds between two values of `now()`.
inline double seconds_between(std::chrono::nanoseconds from, std::chrono::nanoseconds to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace torpor
