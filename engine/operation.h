// SPDX-License-Identifier: Apache-2.0
// Operation: one sleep, wake or checkpoint while it runs: its phases with their clock, and the steps that undo it, in
// reverse, unless it is kept. Lives on the stack of the call; one thread.
//
// A step is registered before what it undoes is begun, so that nothing can fail in between; it does no harm where there
// is nothing to undo. A step that fails, or throws, loses the engine.
//
// Its events: an operation begins and ends, fails or is lost; its number is the sequence of its first event. A phase
// begins and ends, or fails; one that had ended and is taken back is undone. While it is there, nobody who looks at the
// engine stops it.
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
  // Whose operation it is.
  class Owner {
   public:
    virtual bool lost() const noexcept = 0;              // the engine cannot go on
    virtual void lose(const Error& error) noexcept = 0;  // it cannot from now on
   protected:
    ~Owner() = default;
  };

  // `owner` and `clock` outlive it. `progress`: path of a ProgressFile of who asked, or empty. `part_of`: number of an
  // operation whose begin and end are told by somebody else; 0: it is one of its own.
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
    told_end_ = part_of != 0;
    number_ = part_of != 0 ? part_of : tell(EventType::kOperation, kind_, Edge::kBegin);
  }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  ~Operation() {
    if (kept_) {
      end_with(Edge::kEnd);
    } else {
      undo();
    }
    port_.operation_ended();
  }

  void undo_with(std::function<Status()> step) { undo_.push_back(std::move(step)); }
  // Stops once the engine is unrecoverable: what is left to undo would touch memory that is not there, or take away the
  // checkpoint that the requests can still be woken from.
  void undo() noexcept {
    undo_to(0);
    if (!kept_) end_with(owner_.lost() ? Edge::kLost : Edge::kFailed);
  }
  // Why it fails, in words.
  void failed(const Error& error) const noexcept { port_.text(TextKind::kError, 0, number_, error.what); }
  // Undoes all but the first so many steps.
  size_t steps() const noexcept { return undo_.size(); }
  void undo_to(size_t steps) noexcept {
    if (open_ != 0) tell(EventType::kPhase, std::exchange(open_, 0), Edge::kFailed, 0, since(last_));
    while (undo_.size() > steps) {
      const std::function<Status()> step = std::move(undo_.back());
      undo_.pop_back();
      if (owner_.lost()) continue;
      if (const Status undone = try_catch(step); !undone) owner_.lose(undone.error());
    }
    while (!done_.empty() && done_.back().steps >= steps) {
      tell(EventType::kPhase, done_.back().kind, Edge::kUndone);
      done_.pop_back();
    }
  }
  void keep() noexcept {
    undo_.clear();
    done_.clear();
    kept_ = true;
  }

  // What is about to be done cannot be undone: if the call fails, this is said with the error. `what` is a literal.
  void irreversible(std::string_view what) noexcept { irreversible_ = what; }
  std::string_view irreversible() const noexcept { return irreversible_; }

  // Whether who asked has cancelled it, and that as an error. Asked between phases; what copies asks for itself.
  bool cancelled() const noexcept { return progress_ != nullptr && progress_->cancelled(); }
  Status go_on() const { return progress_ == nullptr ? ok() : progress_->check(); }

  // Neither fails: a phase that nobody hears of is no reason to end a sleep.
  void begin(std::string_view phase) noexcept {
    last_ = clock_.now();
    open_ = number_of(phase, kPhaseNames);
    steps_ = undo_.size();
    if (progress_ != nullptr) progress_->begin_phase(open_);
    tell(EventType::kPhase, open_, Edge::kBegin);
  }
  void end(std::string_view phase, uint64_t bytes = 0) noexcept {
    const double seconds = seconds_between(last_, clock_.now());
    (void)try_catch([&]() -> Status {
      phases_.push_back({std::string(phase), seconds, bytes, seconds_between(began_, last_)});
      if (!kept_) done_.push_back({open_, steps_});
      return ok();
    });
    tell(EventType::kPhase, std::exchange(open_, 0), Edge::kEnd, bytes, since(last_));
  }
  void fill(SleepReport& report) noexcept {
    report.phases = std::move(phases_);
    report.seconds = seconds_between(began_, clock_.now());
  }

 private:
  static constexpr size_t kUsualPhases = 8;
  struct Done {  // a phase that ended
    uint8_t kind = 0;
    size_t steps = 0;  // that there were when it began
  };
  uint64_t tell(EventType type, uint8_t kind, Edge edge, uint64_t a = 0, uint64_t b = 0) const noexcept {
    return port_.record(
        {.type = type, .from = kind, .to = static_cast<uint8_t>(edge), .transfer = number_, .a = a, .b = b});
  }
  uint64_t since(std::chrono::nanoseconds time) const noexcept {
    return static_cast<uint64_t>((clock_.now() - time).count());
  }
  void end_with(Edge edge) noexcept {
    if (!std::exchange(told_end_, true)) tell(EventType::kOperation, kind_, edge, 0, since(began_));
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
  uint64_t number_ = 0;  // in events
  uint8_t open_ = 0;     // the phase that was begun and has not ended
  size_t steps_ = 0;     // when the last phase began
  std::vector<Done> done_;
  bool kept_ = false;
  bool told_end_ = false;
};

}  // namespace torpor
