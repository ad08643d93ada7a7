// SPDX-License-Identifier: Apache-2.0
// Breakpoints: conditions at which an engine stops for inspection, and how long it stays stopped.
//
// A stopped engine takes no further step. Requests may still arrive and be aborted, and copies under way end. A sleep,
// wake or checkpoint runs at once: it ends all stops, and no stop begins while it runs. So a stop changes no token. A
// stop has a lease: when the lease ends without renewal, the engine continues. A stop belongs to the connection that
// made it and ends with that connection (drop_owner()), unless it was made to stay for its lease.
//
// A breakpoint is a condition on events. After an event that matches, the engine takes no further step. The thread that
// records the event evaluates the condition, perhaps under its own locks. So all data for it is in atomics, in entries
// (Place) that exist from the beginning. Callers that add or remove breakpoints change the entries under a lock; while
// an entry is changed it matches nothing.
//
// A breakpoint that holds (`alone`) leaves the engine running. It holds back only the request or transfer that matches:
// the engine does not admit or commit that one until the stop ends. Everything else that matches meanwhile waits with
// it and continues with it. The scheduler's thread asks such breakpoints before it continues, without a lock.
//
// Threads: any. Stops are recorded as events (kStop).
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

enum class StopCause : uint8_t { kNone, kPause, kBreakpoint, kHold };  // kHold: since 1.3
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
  std::string request;         // name, with * and ?; empty: any
  std::optional<uint8_t> way;  // of a candidate, or of the blocks that ended
  uint64_t at_least = 0;       // least value of the field `a`: blocks
  uint64_t after = 0;          // number of matches to skip first
  uint64_t every = 1;          // stop at each n-th of the matches after those
  bool once = false;
  bool alone = false;  // hold one request before it is admitted, or one candidate before it is promoted
  std::chrono::nanoseconds lease = kUsualLease;
};

struct BreakpointRow {
  uint32_t id = 0;
  Breakpoint what;
  uint64_t owner = 0;  // 0: it stays when the connection that made it has ended
  uint64_t matches = 0;
};

struct StopRow {
  uint32_t id = 0;  // of the breakpoint, or of the pause
  StopCause cause = StopCause::kPause;
  uint64_t owner = 0;
  uint64_t event = 0;    // sequence of the event after which it stopped; 0: a pause
  uint32_t request = 0;  // of that event
  uint32_t held = 0;     // requests or transfers that wait for its end; at most kMostHeld
  std::chrono::nanoseconds stood{};
  std::chrono::nanoseconds left{};
};

// Return whether a breakpoint may be set on events of this type: those of a serving engine.
bool may_stop_at(EventType type);
// Return whether the breakpoint may hold (`alone`): the engine asks before it does what the event says.
bool may_hold(const Breakpoint& breakpoint);
// Return whether `pattern`, with * and ?, matches all of `text`.
bool matches_glob(std::string_view pattern, std::string_view text) noexcept;

class Breakpoints final : public EventWatch {
 public:
  static constexpr uint32_t kMost = 16;
  static constexpr uint32_t kMostHeld = 64;  // by one breakpoint; beyond them a held request may be held once more
  // `ring` and `clock` must outlive this object. The caller registers it with EventRing::watch().
  Breakpoints(EventRing& ring, const Clock& clock) : ring_(ring), clock_(clock) {}

  // Add a breakpoint and return its id. `names`: names of requests that were recorded before. kInvalidArgument: the
  // error says what is wrong. kResourceExhausted: there are kMost.
  Result<uint32_t> add(const Breakpoint& breakpoint, uint64_t owner, const std::map<uint32_t, std::string>& names = {});
  Status remove(uint32_t id);  // ends its stop, too; kNotFound
  std::vector<BreakpointRow> list() const;

  // Stop the engine and return the id of the stop. kInvalidArgument: the lease is not above 0 or exceeds kMostLease.
  // kUnavailable: a sleep, wake or checkpoint is under way. kResourceExhausted: there are kMost pauses.
  Result<uint32_t> pause(std::chrono::nanoseconds lease, uint64_t owner);
  Status resume(uint32_t id);  // kNotFound: there is no such stop
  size_t resume_all();
  // Let the lease of a stop end after `lease` from now. kNotFound; kInvalidArgument: as pause().
  Status renew(uint32_t id, std::chrono::nanoseconds lease);
  // Let a stopped engine take `steps` steps (1 to 1,000,000), then stop again. kFailedPrecondition: it is not stopped.
  Status step(uint64_t steps);
  std::vector<StopRow> stops() const;
  // Return whether the engine is stopped; false if only requests or transfers are held.
  bool stands() const noexcept { return (standing_.load(std::memory_order_acquire) & ~alone_.load()) != 0; }
  // Return whether a stop may begin or end without a call.
  bool waits() const noexcept;
  // End the breakpoints and stops of this owner.
  void drop_owner(uint64_t owner) noexcept;
  void expire() noexcept;  // end the stops whose lease is over

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
  // A breakpoint or a pause. Everything that saw() reads is in atomics.
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
    // The current stop.
    std::atomic<uint64_t> event = 0;
    std::atomic<uint32_t> request = 0;
    std::atomic<int64_t> began = 0;
    std::atomic<int64_t> deadline = 0;
    // Requests and transfers that it has held since it was set: it does not hold them again. 0: a free element.
    std::array<std::atomic<uint64_t>, kMostHeld> held{};
    std::atomic<uint32_t> holding = 0;      // number ever held
    std::atomic<uint32_t> held_before = 0;  // `holding` when the current stop began
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
  bool end(uint32_t at, StopEdge edge) noexcept;  // false: it is not stopped
  void publish(uint32_t at, StopEdge edge, uint64_t stood) noexcept;
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
  std::atomic<uint32_t> standing_ = 0;  // current stops, a bit each
  std::atomic<uint64_t> steps_ = 0;     // steps that a stopped engine may still take
  std::atomic<int32_t> operations_ = 0;
  // By request number: which globs were tried on its name and which match: number << 32 | tried << 16 | matching.
  std::array<std::atomic<uint64_t>, kNames> names_{};
};

}  // namespace torpor::console
