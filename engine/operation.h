// Operation: one sleep, wake or checkpoint while it runs: its phases with their clock, and the steps that undo it, in
// reverse, unless it is kept. Lives on the stack of the call; one thread.
//
// A step is registered before what it undoes is begun, so that nothing can fail in between; it does no harm where there
// is nothing to undo. A step that fails, or throws, loses the engine.
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
  // Whose operation it is.
  class Owner {
   public:
    virtual bool lost() const noexcept = 0;              // the engine cannot go on
    virtual void lose(const Error& error) noexcept = 0;  // it cannot from now on
   protected:
    ~Owner() = default;
  };

  // `sink` may be null; `owner` and `clock` outlive it.
  Operation(std::string_view name, const Clock& clock, EventSink* sink, Owner& owner)
      : name_(name), clock_(clock), sink_(sink), owner_(owner), began_(clock.now()), last_(began_) {
    phases_.reserve(kUsualPhases);
  }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  ~Operation() { undo(); }

  void undo_with(std::function<Status()> step) { undo_.push_back(std::move(step)); }
  // Stops once the engine is lost: what is left to undo would touch memory that is not there, or take away the
  // checkpoint that the requests can still be woken from.
  void undo() noexcept { undo_to(0); }
  // Undoes all but the first so many steps.
  size_t steps() const noexcept { return undo_.size(); }
  void undo_to(size_t steps) noexcept {
    while (undo_.size() > steps) {
      const std::function<Status()> step = std::move(undo_.back());
      undo_.pop_back();
      if (owner_.lost()) continue;
      if (const Status undone = catching(step); !undone) owner_.lose(undone.error());
    }
  }
  void keep() noexcept { undo_.clear(); }

  // What is about to be done cannot be undone: if the call fails, this is said with the error. `what` is a literal.
  void irreversible(std::string_view what) noexcept { irreversible_ = what; }
  std::string_view irreversible() const noexcept { return irreversible_; }

  // Neither fails: a phase that nobody hears of is no reason to end a sleep.
  void begin(std::string_view phase) noexcept {
    last_ = clock_.now();
    tell({.operation = name_, .phase = phase});
  }
  void end(std::string_view phase, uint64_t bytes = 0) noexcept {
    const double seconds = seconds_between(last_, clock_.now());
    (void)catching([&]() -> Status {
      phases_.push_back({std::string(phase), seconds, bytes});
      return ok();
    });
    tell({.operation = name_, .phase = phase, .finished = true, .seconds = seconds, .bytes = bytes});
  }
  void fill(SleepReport& report) noexcept {
    report.phases = std::move(phases_);
    report.seconds = seconds_between(began_, clock_.now());
  }

 private:
  static constexpr size_t kUsualPhases = 8;
  void tell(const PhaseEvent& event) noexcept {
    if (sink_ == nullptr) return;
    (void)catching([&]() -> Status {
      sink_->on_phase(event);
      return ok();
    });
  }

  const std::string_view name_;
  const Clock& clock_;
  EventSink* const sink_;
  Owner& owner_;
  const std::chrono::nanoseconds began_;
  std::chrono::nanoseconds last_;
  std::string_view irreversible_;
  std::vector<Phase> phases_;
  std::vector<std::function<Status()>> undo_;
};

}  // namespace torpor
