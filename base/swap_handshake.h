// SPDX-License-Identifier: Apache-2.0
// SwapHandshake: how far the two halves of a swap are, and whether it is given up or for good, in one word of a
// SwapChannel. Each step makes another word of the one that was read, and counts only if nobody was faster. So all see
// the steps in one order, and of "it is given up" and "the engine that comes runs" only one ever happens.
//
// The half that gives:  here → ready → done, once it is asleep. Before that it undoes its half when it is given up, and
//                       after it wakes again.
// The half that takes:  here → ready → commit() → done. It runs only after commit(), which needs that the other one is
//                       done, and that it is not given up. Then nobody can give it up any more.
// Either, or somebody else: stop(), also where the other one gives no sign.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <optional>

namespace torpor {

class SwapHandshake {
 public:
  enum class Side : uint8_t { kGives, kTakes };
  enum class Stage : uint8_t {
    kNone,
    kHere,    // it has taken its side
    kReady,   // who gives stands still; who takes has all its content back, and does not run yet
    kDone,    // who gives is asleep; who takes runs
    kFailed,  // it holds nothing of the other's
    kLost,    // it may hold some of the other's for ever
  };
  enum class Look : uint8_t { kWait, kThere, kOver };
  // Of who takes, for who gives.
  enum class End : uint8_t {
    kNone,
    kRuns,
    kHasNothing,  // of the other's memory: it failed, never came, or is no more
    kMayHold,     // some of it: it is lost, or was given up for its silence
    kMayRun,      // it has committed, and gives no sign since
  };

  constexpr explicit SwapHandshake(uint32_t word = 0) : word_(word) {}
  constexpr uint32_t word() const { return word_; }

  constexpr Stage stage(Side side) const {
    return static_cast<Stage>(std::min(word_ >> shift(side) & kStages, static_cast<uint32_t>(Stage::kLost)));
  }
  constexpr bool stopped() const { return (word_ & kStopped) != 0; }
  constexpr bool for_silence() const { return (word_ & kForSilence) != 0; }  // of the other side than stopped_by()
  constexpr bool committed() const { return (word_ & kCommitted) != 0; }
  constexpr std::optional<Side> stopped_by() const {
    if (committed())
      return end() == End::kHasNothing || end() == End::kMayHold ? std::optional(Side::kTakes) : std::nullopt;
    if ((word_ & kByGives) != 0) return Side::kGives;
    if ((word_ & kByTakes) != 0) return Side::kTakes;
    return std::nullopt;
  }

  constexpr SwapHandshake say(Side side, Stage stage) const {
    return SwapHandshake((word_ & ~(kStages << shift(side))) | static_cast<uint32_t>(stage) << shift(side));
  }
  // None: it is stopped already, or too late.
  constexpr std::optional<SwapHandshake> stop(std::optional<Side> by, bool for_silence = false) const {
    if (stopped() || committed()) return std::nullopt;
    const uint32_t whom = !by ? 0 : *by == Side::kGives ? kByGives : kByTakes;
    return SwapHandshake(word_ | kStopped | whom | (for_silence ? kForSilence : 0));
  }
  // By who takes, before what it cannot undo. None: it is stopped.
  constexpr std::optional<SwapHandshake> commit() const {
    if (stopped() || stage(Side::kGives) != Stage::kDone) return std::nullopt;
    return SwapHandshake(word_ | kCommitted);
  }

  // Whether `side` is so far, or will never be.
  constexpr Look look(Side side, Stage wanted) const {
    const Stage now = stage(side);
    if (stopped() || now == Stage::kFailed || now == Stage::kLost) return Look::kOver;
    return now >= wanted ? Look::kThere : Look::kWait;
  }
  constexpr End end() const {
    switch (stage(Side::kTakes)) {
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
  static constexpr uint32_t kByGives = 1U << 9;
  static constexpr uint32_t kByTakes = 1U << 10;
  static constexpr uint32_t kForSilence = 1U << 11;
  static constexpr uint32_t kCommitted = 1U << 12;
  static constexpr uint32_t shift(Side side) { return side == Side::kGives ? 0 : 4; }

  uint32_t word_;
};

}  // namespace torpor
