// SPDX-License-Identifier: Apache-2.0
// Lints: problems that an operator should look at, found in the events of a live engine, of a killed one, or of a
// recording. The result depends on the events alone; times are those of the events.
#pragma once

#include <array>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "console/engine_view.h"
#include "console/source_events.h"

namespace torpor::console {

enum class Lint : uint8_t {
  kSlowTransfer,   // a candidate has not ended for long, compared with its way or at all
  kStarved,        // a request waits while others decode
  kStoredInVain,   // many blocks were stored, hardly any was ever loaded
  kPingPong,       // a block is stored and dropped again and again
  kUnproven,       // copies are not proven to have ended: their blocks are never used again
  kFailedCopies,   // copies failed
  kOperation,      // a sleep, wake or checkpoint failed, or left the engine unrecoverable
  kSlowOperation,  // an operation stops the engine for very long, or one beside it makes no progress
  kStopped,        // somebody has stopped the engine
  kLost,           // events are missing: these findings may be wrong
  kIdlePins,       // blocks below the device are pinned, but by no request and no transfer
  kUnexplained,    // after each sleep more of the device is in use that torpor does not know
  kEnded,          // the process has ended, and was awake with requests
};
inline constexpr int kLints = 13;
std::string_view name(Lint lint);  // "slow transfer", …

struct Finding {
  Lint lint{};
  std::string subject;  // a request, a way, a block
  std::string what;     // a sentence
};

struct LintLimits {
  std::chrono::nanoseconds slow_transfer = std::chrono::seconds(5);
  double times_median = 10;  // and at least 0.1 s
  std::chrono::nanoseconds starved = std::chrono::seconds(30);
  uint64_t stored_in_vain = 1000;  // blocks
  double loaded_share = 0.02;
  uint32_t ping_pong = 3;                                              // times a minute
  std::chrono::nanoseconds slow_operation = std::chrono::seconds(60);  // time for which the engine is stopped
  std::chrono::nanoseconds slow_behind = std::chrono::minutes(10);     // of a phase while it serves and no copy ends
  std::chrono::nanoseconds idle_pins = std::chrono::seconds(60);
  uint64_t unexplained = uint64_t{1} << 20;  // bytes more than after the previous sleep, three times in a row
};

class Lints {
 public:
  explicit Lints(LintLimits limits = {}) : limits_(limits) {}
  // Add an event. All events are of one process, in order.
  void apply(const Event& event);
  // Return the current problems, at the time of the last event. `is_gone`: the process has ended.
  std::vector<Finding> findings(const EngineView& view, bool is_gone = false) const;

 private:
  struct Comings {  // of one key
    int64_t since = 0;
    uint32_t count = 0;
  };
  static constexpr size_t kMostKeys = 1 << 16;
  static constexpr size_t kTimes = 1024;  // durations of ended candidates that are kept, for each way
  void check_transfers(const EngineView& view, std::vector<Finding>& findings) const;
  void check_requests(const EngineView& view, std::vector<Finding>& findings) const;
  void check_tiers(const EngineView& view, std::vector<Finding>& findings) const;
  void check_operations(const EngineView& view, std::vector<Finding>& findings) const;
  void check_slow(const EngineView& view, const OperationRow& row, std::vector<Finding>& findings) const;
  void check_memory(std::vector<Finding>& findings) const;
  void apply_slot(const Event& event);
  void apply_tier(const Event& event);
  void apply_memory(const Event& event);
  void look_for_pins(int64_t time);

  const LintLimits limits_;
  std::map<std::tuple<uint8_t, uint64_t, std::array<uint8_t, 16>>, Comings> comings_;  // by tier, group and key
  uint32_t most_comings_ = 0;
  Digest comer_;
  std::map<uint64_t, int64_t> began_;  // candidates
  std::array<std::vector<int64_t>, kWays> took_;
  std::array<size_t, kWays> next_took_{};
  uint64_t failed_copies_ = 0;
  std::map<uint32_t, uint32_t> staged_;        // blocks, of requests that have any
  std::map<uint64_t, uint64_t> on_their_way_;  // blocks of candidates that have not ended
  std::array<uint32_t, 3> pinned_{};           // by tier
  std::optional<int64_t> pins_since_;          // begin of pins that belong to nothing
  struct Device {                              // of one rank
    uint64_t bytes = 0;                        // torpor's
    bool slept = false;                        // `bytes` has decreased
    std::vector<uint64_t> unexplained;         // after the last four sleeps
  };
  std::map<uint64_t, Device> devices_;
};

struct LintMoment {
  int64_t time = 0;
  Finding finding;
};
// Return when each new problem began, by the time of the events; checked every 50 ms of that time.
std::vector<LintMoment> lint_moments(const SourceEvents& source);

}  // namespace torpor::console
