// SPDX-License-Identifier: Apache-2.0
#include "console/lints.h"

#include <algorithm>
#include <set>

#include <fmt/core.h>

#include "console/breakpoints.h"
#include "console/schema.h"
#include "engine/phases.h"

namespace torpor::console {
namespace {

constexpr int64_t kMinute = 60'000'000'000;
constexpr int64_t kNoticeable = 100'000'000;  // a shorter wait is not reported
constexpr size_t kEnoughTimes = 16;
constexpr int64_t kLookEvery = 50'000'000;  // of a recording's time

double seconds_of(int64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-9; }

}  // namespace

std::string_view name(Lint lint) {
  constexpr std::array<std::string_view, kLints> kNames = {
      "slow transfer",    "starved",        "stored in vain", "ping-pong",   "unproven copies", "failed copies",
      "failed operation", "slow operation", "stopped",        "events lost", "idle pins",       "unexplained memory",
      "ended awake"};
  return kNames[static_cast<size_t>(lint)];
}

void Lints::apply(const Event& event) {
  if (!is_known(event)) return;
  const int64_t time = within(event.time);
  switch (event.type) {
    case EventType::kRegistered: {
      if (event.key == Digest{}) break;  // many blocks at once
      if (comings_.size() >= kMostKeys) comings_.clear();
      Comings& key = comings_[{event.from, event.from == 0 ? 0 : event.b, event.key.bytes}];
      if (key.count == 0 || time - key.since > kMinute) key = {.since = time, .count = 0};
      if (++key.count > most_comings_) {
        most_comings_ = key.count;
        comer_ = event.key;
      }
      break;
    }
    case EventType::kCandidate: {
      if (event.transfer >> 48 >= kWays) break;
      const auto to = static_cast<CandidateState>(event.to);
      if (on_their_way_.size() >= kMostKeys) on_their_way_.clear();
      on_their_way_[event.transfer] = event.a;
      if (to == CandidateState::kCompleted || to == CandidateState::kSkipped) on_their_way_.erase(event.transfer);
      if (to == CandidateState::kPromoted) {
        if (began_.size() >= kMostKeys) began_.clear();
        began_[event.transfer] = time;
      } else if (const auto found = began_.find(event.transfer);
                 found != began_.end() && (to == CandidateState::kCompleted || to == CandidateState::kSkipped)) {
        const size_t way = event.transfer >> 48;
        std::vector<int64_t>& took = took_[way];
        if (took.size() < kTimes) {
          took.push_back(time - found->second);
        } else {
          took[next_took_[way]++ % kTimes] = time - found->second;
        }
        began_.erase(found);
      }
      break;
    }
    case EventType::kCopy: failed_copies_ += static_cast<Edge>(event.to) == Edge::kFailed ? 1 : 0; break;
    case EventType::kSlot: apply_slot(event); break;
    case EventType::kTier: apply_tier(event); break;
    case EventType::kStep: look_for_pins(time); break;
    case EventType::kOperation: pins_since_.reset(); break;  // a sleep keeps blocks of its own
    case EventType::kMemory: apply_memory(event); break;
    default: break;
  }
}

void Lints::apply_slot(const Event& event) {
  const auto to = static_cast<SlotState>(event.to);
  const uint32_t blocks = low_of(event.b);
  if (staged_.size() >= kMostKeys) staged_.clear();
  if (blocks == 0 || to == SlotState::kFinished) {
    staged_.erase(event.request);
  } else {
    staged_[event.request] = blocks;
  }
}

void Lints::apply_tier(const Event& event) {
  pinned_[event.from] = low_of(event.a);
  look_for_pins(within(event.time));
}

// Check host memory and disk only: the engine counts the pins of device blocks, and requests share them.
void Lints::look_for_pins(int64_t time) {
  const uint64_t pinned = uint64_t{pinned_[1]} + pinned_[2];
  if (pinned == 0 || !staged_.empty() || !on_their_way_.empty()) {
    pins_since_.reset();
  } else if (!pins_since_) {
    pins_since_ = time;
  }
}

void Lints::apply_memory(const Event& event) {
  if (devices_.size() >= kMostKeys) devices_.clear();
  Device& device = devices_[event.transfer];
  switch (static_cast<MemoryPart>(event.from)) {
    case MemoryPart::kDevice:
      device.slept = event.a < device.bytes;
      device.bytes = event.a;
      break;
    case MemoryPart::kAnybody:
      if (!std::exchange(device.slept, false)) break;
      device.unexplained.push_back(event.a - std::min(event.a, device.bytes));
      if (device.unexplained.size() > 4) device.unexplained.erase(device.unexplained.begin());
      break;
    default: break;
  }
}

void Lints::check_memory(std::vector<Finding>& findings) const {
  for (const auto& [rank, device] : devices_) {
    bool grew = device.unexplained.size() == 4;
    for (size_t i = 1; i < device.unexplained.size(); ++i)
      grew = grew && device.unexplained[i] >= device.unexplained[i - 1] + limits_.unexplained;
    if (grew)
      findings.push_back({Lint::kUnexplained, fmt::format("rank {}", rank),
                          fmt::format("{:.0f} MiB of the device are in use that torpor does not know, after each of "
                                      "three sleeps more",
                                      static_cast<double>(device.unexplained.back()) / (1 << 20))});
  }
}

std::vector<Finding> Lints::findings(const EngineView& view, bool is_gone) const {
  std::vector<Finding> findings;
  if (is_gone && !view.slots().empty() && view.engine() != "asleep")
    findings.push_back(
        {Lint::kEnded, {}, fmt::format("the process ended with {} requests, not asleep", view.slots().size())});
  check_transfers(view, findings);
  check_requests(view, findings);
  check_tiers(view, findings);
  check_operations(view, findings);
  check_memory(findings);
  if (pins_since_ && within(view.latest()) - *pins_since_ >= limits_.idle_pins.count())
    findings.push_back(
        {Lint::kIdlePins,
         {},
         fmt::format("{} blocks below the device are pinned, by no request and no transfer, for {:.0f} s",
                     pinned_[1] + pinned_[2], seconds_of(within(view.latest()) - *pins_since_))});
  for (const auto& [number, stop] : view.stops())
    findings.push_back({Lint::kStopped, stop.request == 0 ? std::string() : view.name_of(stop.request),
                        fmt::format("stopped by {} {} for {:.1f} s", name(static_cast<StopCause>(stop.cause)), number,
                                    seconds_of(within(view.latest()) - within(stop.since)))});
  if (view.lost() > 0)
    findings.push_back(
        {Lint::kLost, {}, fmt::format("{} events are missing: what is shown may be wrong", view.lost())});
  return findings;
}

void Lints::check_transfers(const EngineView& view, std::vector<Finding>& findings) const {
  for (const auto& [transfer, row] : view.candidates()) {
    if (row.state != CandidateState::kPromoted || transfer >> 48 >= kWays) continue;
    const int64_t waits = within(view.latest()) - within(row.since);
    std::vector<int64_t> took = took_[transfer >> 48];
    int64_t median = 0;
    if (took.size() >= kEnoughTimes) {
      std::nth_element(took.begin(), took.begin() + static_cast<std::ptrdiff_t>(took.size() / 2), took.end());
      median = took[took.size() / 2];
    }
    const bool slow = waits >= limits_.slow_transfer.count();
    const bool slower = median > 0 && waits >= kNoticeable &&
                        static_cast<double>(waits) >= limits_.times_median * static_cast<double>(median);
    if (!slow && !slower) continue;
    std::string what = fmt::format("{} blocks {} have been under way for {:.1f} s", row.blocks,
                                   name(static_cast<Way>(transfer >> 48)), seconds_of(waits));
    if (slower)
      what += fmt::format(", {:.0f} times as long as usual", static_cast<double>(waits) / static_cast<double>(median));
    findings.push_back({Lint::kSlowTransfer, row.request == 0 ? std::string() : view.name_of(row.request), what});
  }
  if (failed_copies_ > 0)
    findings.push_back({Lint::kFailedCopies, {}, fmt::format("{} batches of copies failed", failed_copies_)});
  uint64_t unproven = 0;
  for (const Way way : {Way::kOnboard, Way::kOffload, Way::kDemote})
    unproven += view.ended(way)[static_cast<size_t>(BlockOutcome::kUnproven)];
  if (unproven > 0)
    findings.push_back({Lint::kUnproven,
                        {},
                        fmt::format("{} blocks are never used again: their copies were not proven over", unproven)});
}

void Lints::check_requests(const EngineView& view, std::vector<Finding>& findings) const {
  const bool others_decode = std::any_of(view.slots().begin(), view.slots().end(),
                                         [](const auto& slot) { return slot.second.state == SlotState::kDecoding; });
  if (!others_decode) return;
  for (const auto& [number, row] : view.slots()) {
    const int64_t waits = within(view.latest()) - within(row.since);
    const bool waiting = row.state == SlotState::kInitialized || row.state == SlotState::kPreempted;
    if (!waiting || waits < limits_.starved.count()) continue;
    findings.push_back({Lint::kStarved, view.name_of(number),
                        fmt::format("{} for {:.0f} s while others decode", name(row.state), seconds_of(waits))});
  }
}

void Lints::check_tiers(const EngineView& view, std::vector<Finding>& findings) const {
  const auto moved = [&](Way way) { return view.ended(way)[static_cast<size_t>(BlockOutcome::kTransferred)]; };
  const uint64_t stored = moved(Way::kOffload);
  if (stored >= limits_.stored_in_vain &&
      static_cast<double>(moved(Way::kOnboard)) < limits_.loaded_share * static_cast<double>(stored))
    findings.push_back({Lint::kStoredInVain,
                        {},
                        fmt::format("{} blocks were stored, {} were ever loaded", stored, moved(Way::kOnboard))});
  if (most_comings_ >= limits_.ping_pong)
    findings.push_back(
        {Lint::kPingPong, comer_.hex(),
         fmt::format("this block became findable {} times in a minute: it comes and goes", most_comings_)});
}

void Lints::check_operations(const EngineView& view, std::vector<Finding>& findings) const {
  for (const OperationRow& row : view.operations()) {
    const std::string_view kind = kOperationNames[row.kind];
    if (row.edge == Edge::kFailed || row.edge == Edge::kLost) {
      findings.push_back(
          {Lint::kOperation, std::string(kind),
           fmt::format("{} {}: {}", kind, row.edge == Edge::kLost ? "lost the engine" : "failed", row.error)});
    } else if (row.edge == Edge::kBegin) {
      check_slow(view, row, findings);
    }
  }
}

void Lints::check_slow(const EngineView& view, const OperationRow& row, std::vector<Finding>& findings) const {
  const std::string_view kind = kOperationNames[row.kind];
  const auto since = [&](int64_t time) { return within(view.latest()) - within(time); };
  if (const std::optional<int64_t> stands = view.stands_since(row)) {
    if (since(*stands) >= limits_.slow_operation.count())
      findings.push_back(
          {Lint::kSlowOperation, std::string(kind),
           fmt::format("the engine has stood still for {:.0f} s, for a {}", seconds_of(since(*stands)), kind)});
    return;
  }
  const int64_t went_on = std::max(row.phases.empty() ? row.began : row.phases.back().began, view.last_copy());
  if (since(went_on) >= limits_.slow_behind.count())
    findings.push_back({Lint::kSlowOperation, std::string(kind),
                        fmt::format("{} has not gone on for {:.0f} s, behind the engine, which serves", kind,
                                    seconds_of(since(went_on)))});
}

std::vector<LintMoment> lint_moments(const SourceEvents& source) {
  std::vector<LintMoment> moments;
  EngineView view;
  Lints lints;
  std::set<std::pair<Lint, std::string>> there;
  int64_t looked = -kLookEvery;
  for (size_t at = 0; at < source.events.size(); ++at) {
    const Event& event = source.events[at];
    view.apply(event);
    lints.apply(event);
    const int64_t now = within(view.latest());
    const bool news = event.type == EventType::kOperation || event.type == EventType::kStop ||
                      event.type == EventType::kLost || at + 1 == source.events.size();
    if (!news && now - looked < kLookEvery) continue;
    looked = now;
    std::set<std::pair<Lint, std::string>> here;
    for (Finding& finding : lints.findings(view)) {
      const auto [found, added] = here.emplace(finding.lint, finding.subject);
      if (added && !there.contains(*found)) moments.push_back({now, std::move(finding)});
    }
    there = std::move(here);
  }
  return moments;
}

}  // namespace torpor::console
