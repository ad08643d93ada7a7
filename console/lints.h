// SPDX-License-Identifier: Apache-2.0
// Lints: what an operator should look at, found in what an engine tells: live, in last words and in recordings. Each is
// a pure function of the events; times are those of the events.
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
  kSlowTransfer,   // a candidate that has not ended for a long time, for its way or at all
  kStarved,        // a request waits while others decode
  kStoredInVain,   // many blocks were stored, hardly any was ever loaded
  kPingPong,       // a block comes and goes
  kUnproven,       // copies whose end nobody knows: their blocks are never used again
  kFailedCopies,   // copies failed
  kOperation,      // a sleep, wake or checkpoint failed, or lost the engine
  kSlowOperation,  // the engine stands still for one very long, or one beside it does not go on
  kStopped,        // somebody has stopped the engine
  kLost,           // events are missing: what is said here may be wrong
  kIdlePins,       // blocks below the device are pinned, by no request and no transfer
  kUnexplained,    // after each sleep more of the device is in use that torpor does not know
  kEnded,          // the process is gone, and was awake with requests
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
  std::chrono::nanoseconds slow_operation = std::chrono::seconds(60);  // for which the engine stands still
  std::chrono::nanoseconds slow_behind = std::chrono::minutes(10);  // while it serves: in one phase, and no copy ends
  std::chrono::nanoseconds idle_pins = std::chrono::seconds(60);
  uint64_t unexplained = uint64_t{1} << 20;  // bytes more than after the sleep before, three times
};

class Lints {
 public:
  explicit Lints(LintLimits limits = {}) : limits_(limits) {}
  // Of one process, in order.
  void apply(const Event& event);
  // Returns what is wrong now, by the last event's time. `is_gone`: the process has ended.
  std::vector<Finding> findings(const EngineView& view, bool is_gone = false) const;

 private:
  struct Comings {  // of one key
    int64_t since = 0;
    uint32_t count = 0;
  };
  static constexpr size_t kMostKeys = 1 << 16;
  static constexpr size_t kTimes = 1024;  // of ended candidates that are remembered, by way
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
  std::optional<int64_t> pins_since_;          // that nobody has
  struct Device {                              // of one rank
    uint64_t bytes = 0;                        // torpor's
    bool slept = false;                        // they have become fewer
    std::vector<uint64_t> unexplained;         // after the last four sleeps
  };
  std::map<uint64_t, Device> devices_;
};

struct LintMoment {
  int64_t time = 0;
  Finding finding;
};
// When each began that was not there before, by the events' own time; looked at every 50 ms of it.
std::vector<LintMoment> lint_moments(const SourceEvents& source);

}  // namespace torpor::console
