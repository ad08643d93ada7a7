// SPDX-License-Identifier: Apache-2.0
// BackgroundEvents: the events and the phases of a checkpoint that is written while the engine serves. They are those
// of any operation (engine/operation.h). The Operation of the stop is a part of it, and emits the phases of the stop. A
// debugger may pause the engine meanwhile.
//
// Owner: BackgroundCheckpoint. Threads: one at a time. Failure: none.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/event.h"
#include "base/status.h"
#include "engine/phases.h"
#include "engine/sleep_report.h"

namespace torpor {

class BackgroundEvents {
 public:
  BackgroundEvents(const Clock& clock, EventPort port) : clock_(clock), port_(port), began_(clock.now()) {
    number_ = publish(EventType::kOperation, kKind, Edge::kBegin);
  }
  BackgroundEvents(const BackgroundEvents&) = delete;
  BackgroundEvents& operator=(const BackgroundEvents&) = delete;
  ~BackgroundEvents() { end(Edge::kFailed, {}); }

  uint64_t number() const noexcept { return number_; }
  void enter(std::string_view phase) noexcept {
    entered_ = clock_.now();
    open_ = number_of(phase, kPhaseNames);
    publish(EventType::kPhase, open_, Edge::kBegin);
  }
  void leave(uint64_t bytes = 0) noexcept {
    if (open_ == 0) return;
    (void)try_catch([&]() -> Status {
      phases_.push_back({std::string(kPhaseNames.at(open_)), seconds_between(entered_, clock_.now()), bytes,
                         seconds_between(began_, entered_)});
      return ok();
    });
    publish(EventType::kPhase, std::exchange(open_, 0), Edge::kEnd, bytes, since(entered_));
  }
  // Add the phases of the stop, which began then.
  void add(const std::vector<Phase>& stop, std::chrono::nanoseconds began) {
    for (Phase phase : stop) {
      phase.after += seconds_between(began_, began);
      phases_.push_back(std::move(phase));
    }
  }
  // Return the phases that have ended, in their order.
  std::vector<Phase> take_phases() noexcept { return std::exchange(phases_, {}); }
  // Emit the end of the operation; only the first call counts. A phase that is still open has failed. `why`: the error
  // in words, or empty.
  void end(Edge edge, std::string_view why) noexcept {
    if (std::exchange(ended_, true)) return;
    if (open_ != 0) publish(EventType::kPhase, std::exchange(open_, 0), Edge::kFailed, 0, since(entered_));
    if (!why.empty()) port_.text(TextKind::kError, 0, number_, why);
    publish(EventType::kOperation, kKind, edge, 0, since(began_));
  }

 private:
  static constexpr uint8_t kKind = number_of("checkpoint", kOperationNames);
  uint64_t publish(EventType type, uint8_t kind, Edge edge, uint64_t a = 0, uint64_t b = 0) const noexcept {
    return port_.record(
        {.type = type, .from = kind, .to = static_cast<uint8_t>(edge), .transfer = number_, .a = a, .b = b});
  }
  uint64_t since(std::chrono::nanoseconds time) const noexcept {
    return static_cast<uint64_t>((clock_.now() - time).count());
  }

  const Clock& clock_;
  const EventPort port_;
  const std::chrono::nanoseconds began_;
  std::chrono::nanoseconds entered_{};
  std::vector<Phase> phases_;
  uint64_t number_ = 0;
  uint8_t open_ = 0;
  bool ended_ = false;
};

}  // namespace torpor
