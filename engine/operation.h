// SPDX-License-Identifier: Apache-2.0
// Operation: one sleep, wake or checkpoint while it runs: its phases with their times, and the steps that undo it. The
// destructor undoes them in reverse order unless commit() was called. It lives on the stack of the call. Threads: one.
//
// An undo step is registered before the work that it undoes begins, so that nothing can fail in between. If there is
// nothing to undo, the step does no harm. If a step fails or throws, the engine is unrecoverable.
//
// Events: an operation begins, and then ends, fails, or is lost: it failed and the engine is unrecoverable. Its number
// is the sequence number of its first event. A phase begins, and then ends or fails; if it had ended and its steps are
// undone, it is undone. While an operation runs no debugger pauses the engine, and one that had paused it lets it go
// on.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/event.h"
#include "base/progress_file.h"
#include "engine/phases.h"
#include "engine/sleep_report.h"

namespace torpor {

class Operation {
 public:
  // The engine to which the operation belongs.
  class Owner {
   public:
    virtual bool unrecoverable() const noexcept = 0;
    virtual void mark_unrecoverable(const Error& error) noexcept = 0;

   protected:
    ~Owner() = default;
  };

  // `owner` and `clock` outlive it. `progress`: path of the caller's ProgressFile, or empty. `part_of`: the number of
  // the operation of which this one is a part, and whose begin and end others emit; 0: it is an operation of its own.
  Operation(std::string_view name, const Clock& clock, EventPort port, Owner& owner, const std::string& progress,
            uint64_t part_of = 0)
      : kind_(number_of(name, kOperationNames)),
        clock_(clock),
        port_(port),
        owner_(owner),
        progress_(ProgressFile::of_caller(progress)),
        began_(clock.now()),
        last_(began_) {
    phases_.reserve(kUsualPhases);
    port_.operation_begins();
    published_end_ = part_of != 0;
    number_ = part_of != 0 ? part_of : publish(EventType::kOperation, kind_, Edge::kBegin);
  }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  ~Operation() {
    if (committed_) {
      end_with(Edge::kEnd);
    } else {
      undo();
    }
    port_.operation_ended();
  }

  void undo_with(std::function<Status()> step) { undo_.push_back(std::move(step)); }
  // Undo all steps. Stop if the engine becomes unrecoverable: further steps would touch memory that is not there, or
  // delete the checkpoint from which the requests can still be woken.
  void undo() noexcept {
    undo_to(0);
    if (!committed_) end_with(owner_.unrecoverable() ? Edge::kLost : Edge::kFailed);
  }
  // Emit the error's words.
  void failed(const Error& error) const noexcept { port_.text(TextKind::kError, 0, number_, error.what); }
  // Return the number of registered undo steps.
  size_t steps() const noexcept { return undo_.size(); }
  // Undo all steps but the first `steps`.
  void undo_to(size_t steps) noexcept {
    if (open_ != 0) publish(EventType::kPhase, std::exchange(open_, 0), Edge::kFailed, 0, since(last_));
    while (undo_.size() > steps) {
      const std::function<Status()> step = std::move(undo_.back());
      undo_.pop_back();
      if (owner_.unrecoverable()) continue;
      if (const Status undone = try_catch(step); !undone) owner_.mark_unrecoverable(undone.error());
    }
    while (!done_.empty() && done_.back().steps >= steps) {
      publish(EventType::kPhase, done_.back().kind, Edge::kUndone);
      done_.pop_back();
    }
  }
  // The operation has succeeded: forget all undo steps.
  void commit() noexcept {
    undo_.clear();
    done_.clear();
    committed_ = true;
  }

  // Note that the next step cannot be undone. If the call fails, its error says so with `what`, a literal.
  void irreversible(std::string_view what) noexcept { irreversible_ = what; }
  std::string_view irreversible() const noexcept { return irreversible_; }

  // Return whether the caller has cancelled; go_on() returns that as an error. Called between phases; the code that
  // copies checks the ProgressFile itself.
  bool cancelled() const noexcept { return progress_ != nullptr && progress_->cancelled(); }
  Status go_on() const { return progress_ == nullptr ? ok() : progress_->check(); }

  // begin() and end() cannot fail: a sleep need not end because an event has no listener.
  void begin(std::string_view phase) noexcept {
    last_ = clock_.now();
    open_ = number_of(phase, kPhaseNames);
    steps_ = undo_.size();
    if (progress_ != nullptr) progress_->begin_phase(open_);
    publish(EventType::kPhase, open_, Edge::kBegin);
  }
  void end(std::string_view phase, uint64_t bytes = 0) noexcept {
    const double seconds = seconds_between(last_, clock_.now());
    (void)try_catch([&]() -> Status {
      phases_.push_back({std::string(phase), seconds, bytes, seconds_between(began_, last_)});
      if (!committed_) done_.push_back({open_, steps_});
      return ok();
    });
    publish(EventType::kPhase, std::exchange(open_, 0), Edge::kEnd, bytes, since(last_));
  }
  void fill(SleepReport& report) noexcept {
    report.phases = std::move(phases_);
    report.seconds = seconds_between(began_, clock_.now());
  }

 private:
  static constexpr size_t kUsualPhases = 8;
  struct Done {  // a phase that ended
    uint8_t kind = 0;
    size_t steps = 0;  // number of undo steps when it began
  };
  uint64_t publish(EventType type, uint8_t kind, Edge edge, uint64_t a = 0, uint64_t b = 0) const noexcept {
    return port_.record(
        {.type = type, .from = kind, .to = static_cast<uint8_t>(edge), .transfer = number_, .a = a, .b = b});
  }
  uint64_t since(std::chrono::nanoseconds time) const noexcept {
    return static_cast<uint64_t>((clock_.now() - time).count());
  }
  void end_with(Edge edge) noexcept {
    if (!std::exchange(published_end_, true)) publish(EventType::kOperation, kind_, edge, 0, since(began_));
  }

  const uint8_t kind_;
  const Clock& clock_;
  const EventPort port_;
  Owner& owner_;
  const std::shared_ptr<ProgressFile> progress_;
  const std::chrono::nanoseconds began_;
  std::chrono::nanoseconds last_;
  std::string_view irreversible_;
  std::vector<Phase> phases_;
  std::vector<std::function<Status()>> undo_;
  uint64_t number_ = 0;  // of the operation, in events
  uint8_t open_ = 0;     // the phase that has begun and not ended; 0: none
  size_t steps_ = 0;     // number of undo steps when the last phase began
  std::vector<Done> done_;
  bool committed_ = false;
  bool published_end_ = false;
};

}  // namespace torpor
