// SPDX-License-Identifier: Apache-2.0
// SwapHandshake: the stages of both sides of a swap, and whether it is stopped or committed, in one word of a
// SwapChannel. A step computes a new word from the one that it read; it counts only if no other step came between. So
// all processes see the steps in one order, and either "stopped" or "the engine that wakes runs" happens, never both.
//
// The side that falls asleep: here → ready → done, once it is asleep. If the swap is stopped before that, it undoes its
//                             half; after that it wakes again.
// The side that wakes:        here → ready → commit() → done. It runs only after commit(), which needs that the other
//                             side is done and that the swap is not stopped. After commit() nothing stops it.
// Either side, or another process: stop(), also if the other side sends no heartbeat.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <optional>

namespace torpor {

class SwapHandshake {
 public:
  enum class Side : uint8_t { kSwapsOut, kSwapsIn };
  enum class Stage : uint8_t {
    kNone,
    kHere,    // it has joined
    kReady,   // one engine is stopped; the other has all its content back, and does not run yet
    kDone,    // one engine is asleep; the other runs
    kFailed,  // it failed and holds no memory of the other side
    kLost,    // it failed and may hold memory of the other side for ever
  };
  enum class Look : uint8_t { kWait, kThere, kOver };
  // State of the side that wakes, after the swap, for the side that falls asleep.
  enum class End : uint8_t {
    kNone,
    kRuns,
    // It holds no memory of the other side: it failed, never joined, or its process ended.
    kHasNothing,
    // It may hold memory of the other side: it is lost, or sent no heartbeat.
    kMayHold,
    kMayRun,  // it has committed, and sent no heartbeat since
  };

  constexpr explicit SwapHandshake(uint32_t word = 0) : word_(word) {}
  constexpr uint32_t word() const { return word_; }

  constexpr Stage stage(Side side) const {
    return static_cast<Stage>(std::min(word_ >> shift(side) & kStages, static_cast<uint32_t>(Stage::kLost)));
  }
  constexpr bool stopped() const { return (word_ & kStopped) != 0; }
  // Stopped because the side other than stopped_by() sent no heartbeat.
  constexpr bool for_timeout() const { return (word_ & kForTimeout) != 0; }
  constexpr bool committed() const { return (word_ & kCommitted) != 0; }
  constexpr std::optional<Side> stopped_by() const {
    if (committed())
      return end() == End::kHasNothing || end() == End::kMayHold ? std::optional(Side::kSwapsIn) : std::nullopt;
    if ((word_ & kByOut) != 0) return Side::kSwapsOut;
    if ((word_ & kByIn) != 0) return Side::kSwapsIn;
    return std::nullopt;
  }

  constexpr SwapHandshake reach(Side side, Stage stage) const {
    return SwapHandshake((word_ & ~(kStages << shift(side))) | static_cast<uint32_t>(stage) << shift(side));
  }
  // Return the word after a stop; none: it is already stopped, or committed.
  constexpr std::optional<SwapHandshake> stop(std::optional<Side> by, bool for_timeout = false) const {
    if (stopped() || committed()) return std::nullopt;
    const uint32_t whom = !by ? 0 : *by == Side::kSwapsOut ? kByOut : kByIn;
    return SwapHandshake(word_ | kStopped | whom | (for_timeout ? kForTimeout : 0));
  }
  // Return the word after the commit of the side that wakes; none: the swap is stopped, or the other side is not done.
  constexpr std::optional<SwapHandshake> commit() const {
    if (stopped() || stage(Side::kSwapsOut) != Stage::kDone) return std::nullopt;
    return SwapHandshake(word_ | kCommitted);
  }

  // Return whether `side` has reached `wanted` (kThere), never will (kOver), or still may (kWait).
  constexpr Look look(Side side, Stage wanted) const {
    const Stage now = stage(side);
    if (stopped() || now == Stage::kFailed || now == Stage::kLost) return Look::kOver;
    return now >= wanted ? Look::kThere : Look::kWait;
  }
  constexpr End end() const {
    switch (stage(Side::kSwapsIn)) {
      case Stage::kDone: return End::kRuns;
      case Stage::kNone:
      case Stage::kFailed: return End::kHasNothing;
      case Stage::kLost: return End::kMayHold;
      case Stage::kHere:
      case Stage::kReady: break;
    }
    return End::kNone;
  }

  friend constexpr auto operator<=>(const SwapHandshake&, const SwapHandshake&) = default;

 private:
  static constexpr uint32_t kStages = 0xf;  // four bits a side
  static constexpr uint32_t kStopped = 1U << 8;
  static constexpr uint32_t kByOut = 1U << 9;
  static constexpr uint32_t kByIn = 1U << 10;
  static constexpr uint32_t kForTimeout = 1U << 11;
  static constexpr uint32_t kCommitted = 1U << 12;
  static constexpr uint32_t shift(Side side) { return side == Side::kSwapsOut ? 0 : 4; }

  uint32_t word_;
};

}  // namespace torpor
