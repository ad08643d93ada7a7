// SPDX-License-Identifier: Apache-2.0
// Stops: stops the engine of a simulation, as a console would, and lets it continue in every possible way: resumed,
// after some steps, at the end of the lease, because its console is gone, or by a sleep.
#pragma once

#include <algorithm>
#include <vector>

#include "console/breakpoints.h"
#include "tests/simulation/scenario.h"

namespace torpor::test {

class Stops {
 public:
  // `holds`: also hold single requests and candidates, which changes the order in which tokens are computed.
  Stops(EventRing& ring, console::RunClock& clock, uint64_t seed, bool holds)
      : ring_(ring), clock_(clock), points_(ring, clock), dice_(seed * 2246822519u + 3), holds_(holds) {
    ring_.watch(&points_);
  }
  ~Stops() { ring_.watch(nullptr); }
  Stops(const Stops&) = delete;
  Stops& operator=(const Stops&) = delete;

  // Call before a step. Perhaps stop the engine now, or add a breakpoint.
  void set() {
    if (dice_.chance(0.04)) must(points_.pause(lease(), owner()), "pause");
    if (dice_.chance(0.04)) points_.drop_owner(owner());
    if (dice_.chance(0.1) && points_.list().size() < kMost) {
      console::Breakpoint made{
          .type = dice_.one_of({EventType::kStep, EventType::kSlot, EventType::kHit, EventType::kCandidate,
                                EventType::kPlanned, EventType::kEnded, EventType::kRegistered, EventType::kDropped,
                                EventType::kCopy, EventType::kTier}),
          .after = static_cast<uint64_t>(dice_.between(0, 4)),
          .every = static_cast<uint64_t>(dice_.between(1, 6)),
          .once = dice_.chance(0.5),
          .lease = lease()};
      if (holds_ && dice_.chance(0.4)) {
        made = {.type = dice_.one_of({EventType::kRequest, EventType::kCandidate}),
                .once = made.once,
                .alone = true,
                .lease = made.lease};
      }
      must(points_.add(made, owner()), "breakpoint");
    }
  }
  // Let the engine continue. `step` steps the engine, which must do nothing while it is stopped. Return whether it was
  // stopped.
  template <class Step>
  bool stand(const Step& step) {
    for (int looks = 0;; ++looks) {
      if (points_.may_step()) return looks > 0;
      if (looks > 500) throw Failed{"the engine stands and does not go on"};
      if (!step().empty()) throw Failed{"a token was made by an engine that stands"};
      const std::vector<console::StopRow> stops = points_.stops();
      if (stops.empty()) continue;  // it has just ended
      const console::StopRow& one = stops[static_cast<size_t>(dice_.between(0, std::ssize(stops) - 1))];
      switch (dice_.between(0, 5)) {
        case 0:
          if (points_.resume(one.id) && stands(one.id)) throw Failed{"a stop stands that was resumed"};
          break;
        case 1: (void)points_.resume_all(); break;
        case 2: clock_.set(clock_.now() + one.left); break;  // its lease expires
        case 3: points_.drop_owner(one.owner); break;
        case 4: (void)points_.renew(one.id, lease()); break;
        case 5: (void)points_.step(static_cast<uint64_t>(dice_.between(1, 4))); break;
      }
    }
  }
  // Check that an operation has ended every stop.
  void check_operation() const {
    if (!points_.stops().empty()) throw Failed{"a stop stands while the engine sleeps"};
  }
  void end() {
    for (const console::BreakpointRow& row : points_.list()) must(points_.remove(row.id), "removing a breakpoint");
    (void)points_.resume_all();
  }

 private:
  static constexpr size_t kMost = 5;
  std::chrono::nanoseconds lease() { return std::chrono::milliseconds(dice_.between(1, 60)); }
  uint64_t owner() { return static_cast<uint64_t>(dice_.between(0, 3)); }
  bool stands(uint32_t id) const {
    const std::vector<console::StopRow> stops = points_.stops();
    return std::any_of(stops.begin(), stops.end(), [id](const console::StopRow& stop) { return stop.id == id; });
  }

  EventRing& ring_;
  console::RunClock& clock_;
  console::Breakpoints points_;
  Dice dice_;
  const bool holds_;
};

}  // namespace torpor::test
