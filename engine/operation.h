// Operation: one sleep or wake while it runs: its phases with their clock, and the steps that undo it, in reverse,
// unless it is kept. Lives on the stack of the call; one thread.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/event_sink.h"
#include "engine/sleep_report.h"

namespace torpor {

class Operation {
 public:
  // `sink` may be null. `lost` says that the engine cannot go on.
  Operation(std::string_view name, const Clock& clock, EventSink* sink, std::function<bool()> lost)
      : name_(name), clock_(clock), sink_(sink), lost_(std::move(lost)), began_(clock.now()), last_(began_) {}
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  void undo_with(std::function<void()> step) { undo_.push_back(std::move(step)); }
  // Stops once the engine is lost: what is left to undo would touch memory that is not there, or take away the
  // checkpoint that the requests can still be woken from.
  void undo() {
    for (auto step = undo_.rbegin(); step != undo_.rend() && !lost_(); ++step) (*step)();
    undo_.clear();
  }
  void keep() { undo_.clear(); }

  void begin(std::string_view phase) {
    last_ = clock_.now();
    if (sink_ != nullptr) sink_->on_phase({.operation = name_, .phase = phase});
  }
  void end(std::string_view phase, uint64_t bytes = 0) {
    const double seconds = seconds_between(last_, clock_.now());
    phases_.push_back({std::string(phase), seconds, bytes});
    if (sink_ != nullptr)
      sink_->on_phase({.operation = name_, .phase = phase, .finished = true, .seconds = seconds, .bytes = bytes});
  }
  void fill(SleepReport& report) {
    report.phases = std::move(phases_);
    report.seconds = seconds_between(began_, clock_.now());
  }

 private:
  const std::string_view name_;
  const Clock& clock_;
  EventSink* const sink_;
  const std::function<bool()> lost_;
  const std::chrono::nanoseconds began_;
  std::chrono::nanoseconds last_;
  std::vector<Phase> phases_;
  std::vector<std::function<void()>> undo_;
};

}  // namespace torpor
