// SPDX-License-Identifier: Apache-2.0
// Breakpoints: where an engine stops so that it can be looked at as it stands, and for how long.
//
// A stop means that no further step is taken: requests may come and be aborted, copies under way end, and a sleep, wake
// or checkpoint goes on at once, because it ends all stops and makes none. So a stop changes no token. It has a lease:
// when that is over, the engine goes on, whoever should have renewed it. A stop belongs to who made it, and ends with
// its connection (drop_owner()), unless it was made to stay for its lease.
//
// A breakpoint is a condition on events: after one that matches, the engine takes no further step. It is asked in the
// thread that tells the event, maybe under its locks: so what it knows lies in atomics, in places that are there from
// the beginning. BlockLocations are changed under a lock by who adds and removes breakpoints; while one is changed it
// matches nothing.
//
// A breakpoint that holds (`alone`) leaves the engine running: the one request or transfer that it matches is not
// admitted, or not committed, until its stop ends; all that matches meanwhile waits with it, and goes with it. It is
// asked by who would go on, in the scheduler's thread, where no lock is held.
//
// Threads: any. Stops are told as events (kStop).
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/event_ring.h"
#include "base/mutex.h"

namespace torpor::console {

enum class StopCause : uint8_t { kNone, kPause, kBreakpoint, kHold };  // the last since 1.3
inline constexpr int kStopCauses = 4;
std::string_view name(StopCause cause);

enum class StopEdge : uint8_t { kNone, kBegun, kResumed, kExpired, kGone, kOperation };
inline constexpr int kStopEdges = 6;
std::string_view name(StopEdge edge);  // "begun", "resumed", "expired", "console gone", "operation"

inline constexpr std::chrono::seconds kUsualLease{30};
inline constexpr std::chrono::seconds kMostLease{300};
inline constexpr size_t kMostGlob = 63;  // bytes

struct Breakpoint {
  EventType type = EventType::kSlot;
  std::optional<uint8_t> from;
  std::optional<uint8_t> to;
  std::string request;         // with * and ?; empty: any
  std::optional<uint8_t> way;  // of a candidate, or of the blocks that ended
  uint64_t at_least = 0;       // of the field `a`: blocks
  uint64_t after = 0;          // matches that are let by first
  uint64_t every = 1;          // of those behind them
  bool once = false;
  bool alone = false;  // of a request before it is admitted, of a candidate before it is promoted
  std::chrono::nanoseconds lease = kUsualLease;
};

struct BreakpointRow {
  uint32_t id = 0;
  Breakpoint what;
  uint64_t owner = 0;  // 0: it stays when who made it is gone
  uint64_t matches = 0;
};

struct StopRow {
  uint32_t id = 0;  // of the breakpoint, or of the pause
  StopCause cause = StopCause::kPause;
  uint64_t owner = 0;
  uint64_t event = 0;    // sequence of the event it stopped after; 0: a pause
  uint32_t request = 0;  // of that event
  uint32_t held = 0;     // requests or transfers that wait for its end; of the last kMostHeld
  std::chrono::nanoseconds stood{};
  std::chrono::nanoseconds left{};
};

// Events of which a breakpoint makes sense: those of a serving engine.
bool may_stop_at(EventType type);
// And of which one that holds: who does this asks before.
bool may_hold(const Breakpoint& breakpoint);
// `pattern` with * and ? for the whole of `text`.
bool matches_glob(std::string_view pattern, std::string_view text) noexcept;

class Breakpoints final : public EventWatch {
 public:
  static constexpr uint32_t kMost = 16;
  static constexpr uint32_t kMostHeld = 64;  // by one; beyond them what waited may be held once more
  // Both outlive it. It does not watch the ring by itself (EventRing::watch()).
  Breakpoints(EventRing& ring, const Clock& clock) : ring_(ring), clock_(clock) {}

  // Its id. `names`: of the requests that were told before. kInvalidArgument names what is wrong; kResourceExhausted.
  Result<uint32_t> add(const Breakpoint& breakpoint, uint64_t owner, const std::map<uint32_t, std::string>& names = {});
  Status remove(uint32_t id);  // with its stop; kNotFound
  std::vector<BreakpointRow> list() const;

  // The stop's id. kResourceExhausted; kInvalidArgument: the lease.
  Result<uint32_t> pause(std::chrono::nanoseconds lease, uint64_t owner);
  Status resume(uint32_t id);  // kNotFound: it does not stand
  size_t resume_all();
  // From now. kNotFound, kInvalidArgument.
  Status renew(uint32_t id, std::chrono::nanoseconds lease);
  // Of a stopped engine: so many steps, then it stands again. kFailedPrecondition: it does not stand.
  Status step(uint64_t steps);
  std::vector<StopRow> stops() const;
  // The engine; not only a request or a transfer.
  bool stands() const noexcept { return (standing_.load(std::memory_order_acquire) & ~alone_.load()) != 0; }
  // Something may begin or end without a call.
  bool waits() const noexcept;
  // Its breakpoints and stops end.
  void drop_owner(uint64_t owner) noexcept;
  void expire() noexcept;  // what is over by now

  void saw(const Event& event) noexcept override;
  void named(uint32_t request, std::string_view name) noexcept override;
  bool may_step() noexcept override;
  bool may_go(const Event& about) noexcept override;
  bool holds() const noexcept override {
    return ((armed_.load(std::memory_order_acquire) | standing_.load(std::memory_order_acquire)) & alone_.load()) != 0;
  }
  void operation_begins() noexcept override;
  void operation_ended() noexcept override { operations_.fetch_sub(1, std::memory_order_acq_rel); }

 private:
  // A breakpoint, or a pause. All that saw() reads is in atomics.
  struct Place {
    std::atomic<uint32_t> id = 0;  // 0: it matches nothing
    std::atomic<uint32_t> type_from_to = 0;
    std::atomic<uint32_t> way = 0;
    std::atomic<uint64_t> at_least = 0;
    std::atomic<uint64_t> after = 0;
    std::atomic<uint64_t> every = 1;
    std::atomic<bool> once = false;
    std::atomic<bool> globbed = false;
    std::array<std::atomic<uint64_t>, 8> glob{};
    std::atomic<int64_t> lease = 0;
    std::atomic<uint64_t> matched = 0;
    // Of the stop that stands.
    std::atomic<uint64_t> event = 0;
    std::atomic<uint32_t> request = 0;
    std::atomic<int64_t> began = 0;
    std::atomic<int64_t> deadline = 0;
    // What it held, since it was set: it is not held again. 0: a free place.
    std::array<std::atomic<uint64_t>, kMostHeld> held{};
    std::atomic<uint32_t> holding = 0;      // ever
    std::atomic<uint32_t> held_before = 0;  // its stop began
  };
  struct Known {  // under the lock
    bool used = false;
    bool pause = false;
    uint32_t id = 0;
    uint64_t owner = 0;
    Breakpoint what;
  };
  static constexpr uint32_t kPlaces = 2 * kMost;  // breakpoints, then pauses
  static constexpr uint32_t kNames = 1 << 12;
  static constexpr uint32_t kAny = 0xff;

  std::optional<uint32_t> find(uint32_t id) const TORPOR_REQUIRES(mutex_);
  std::optional<uint32_t> room(bool pause) TORPOR_REQUIRES(mutex_);
  void arm(uint32_t at, const Breakpoint& what) TORPOR_REQUIRES(mutex_);
  void retire(uint32_t at, StopEdge edge) noexcept TORPOR_REQUIRES(mutex_);
  bool matches(uint32_t at, const Event& event) const noexcept;
  bool glob_matches(const Place& place, std::string_view name) const noexcept;
  void name_one(uint32_t request, std::string_view name, uint32_t evaluated, bool only_new) noexcept;
  uint32_t matched_names(uint32_t request) const noexcept;
  void stand(uint32_t at, uint64_t event, uint32_t request, int64_t now) noexcept;
  bool end(uint32_t at, StopEdge edge) noexcept;  // false: it does not stand
  void tell(uint32_t at, StopEdge edge, uint64_t stood) noexcept;
  bool holds_back(uint32_t at, const Event& about, int64_t now) noexcept;
  void forget_held(uint32_t request) noexcept;
  StopCause cause_of(uint32_t at) const noexcept;

  EventRing& ring_;
  const Clock& clock_;
  mutable Mutex mutex_;
  std::array<Known, kPlaces> known_ TORPOR_GUARDED_BY(mutex_);
  uint32_t last_id_ TORPOR_GUARDED_BY(mutex_) = 0;
  std::array<Place, kPlaces> places_;
  std::atomic<uint32_t> armed_ = 0;     // breakpoints, a bit each
  std::atomic<uint32_t> alone_ = 0;     // those of them that hold
  std::atomic<uint32_t> standing_ = 0;  // stops, a bit each
  std::atomic<uint64_t> steps_ = 0;     // that a stopped engine may still take
  std::atomic<int32_t> operations_ = 0;
  // Of each request's number which globs were tried on its name and which match: number << 32 | tried << 16 | matching.
  std::array<std::atomic<uint64_t>, kNames> names_{};
};

}  // namespace torpor::console
