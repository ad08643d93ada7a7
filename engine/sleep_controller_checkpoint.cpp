// SPDX-License-Identifier: Apache-2.0
// SleepController::checkpoint(), and what is held for a front end: end_sleep().
#include "base/log.h"
#include "engine/sleep_controller.h"
#include "engine/sleep_in_progress.h"

namespace torpor {

Result<SleepReport> SleepController::checkpoint(const Value& outputs, DataParallel data_parallel,
                                                const std::string& progress, const Metadata& metadata) {
  return catching([&] {
    return checkpoint_now({.preserve_state = true,
                           .to_disk = true,
                           .weights = Weights::kReload,
                           .outputs = outputs,
                           .metadata = metadata,
                           .data_parallel = data_parallel,
                           .progress = progress});
  });
}

Result<SleepReport> SleepController::checkpoint_now(SleepOptions options) {
  if (!operation_mutex_.try_lock()) return busy();
  const MutexLock in_progress(operation_mutex_, std::adopt_lock);
  TORPOR_TRY(may_checkpoint(options));
  settle_behind("another one was asked for");
  const auto write = [&](FallingAsleep& sleep) TORPOR_REQUIRES(operation_mutex_) {
    set_state(State::kFallingAsleep);
    return catching([&]() TORPOR_REQUIRES(operation_mutex_) -> Status {
      sleep.report.to = "disk";
      sleep.report.preserve_state = true;
      TORPOR_TRY(admit(sleep));
      TORPOR_TRY(quiesce(sleep));
      return keep(sleep);
    });
  };
  if (options.data_parallel.size > 1) {
    auto held = std::make_unique<HeldSleep>(*this, "checkpoint", options, true);
    if (Status written = write(held->sleep); !written)
      return undone(held->sleep, "checkpoint", std::move(written).error());
    return hold_sleep(std::move(held));
  }
  FallingAsleep sleep(*this, "checkpoint", options);
  if (Status written = write(sleep); !written) return undone(sleep, "checkpoint", std::move(written).error());
  return serve_on(sleep);
}

// Of an engine that serves; it waits for what still comes back of the last wake.
Status SleepController::may_checkpoint(const SleepOptions& options) {
  TORPOR_TRY(check(options));
  TORPOR_TRY(may_begin());
  if (is_sleeping())
    return Error{.code = Code::kFailedPrecondition,
                 .what = "the engine is asleep",
                 .next_step = "wake it first, or let it sleep to disk"};
  return wait_for_late();
}

// Ranks may be on other hosts.
Status SleepController::all_see(PendingCheckpoint& checkpoint) {
  TORPOR_ASSIGN(std::vector<orders::LeaveSign::Reply> signs,
                ranks_.call(orders::LeaveSign{.directory = checkpoint.staging_path()}));
  std::vector<std::string> hosts;
  for (orders::LeaveSign::Reply& sign : signs) hosts.push_back(std::move(sign.host));
  return checkpoint.take_signs(hosts);
}

Status SleepController::seen_by_all(const std::string& directory, size_t ranks) {
  if (ranks < 2 || behind_ != nullptr) return ok();
  TORPOR_ASSIGN(const std::unique_ptr<CheckpointManager> checkpoints, manager(directory));
  TORPOR_ASSIGN(PendingCheckpoint empty, checkpoints->begin(0));
  return all_see(empty);
}

Status SleepController::check_directory() {
  return catching([this]() -> Status {
    if (!operation_mutex_.try_lock()) return busy();
    const MutexLock in_progress(operation_mutex_, std::adopt_lock);
    TORPOR_ASSIGN(const Described described, ranks_.call(orders::Describe{}));
    return seen_by_all(options_.directory, described.size());
  });
}

// The checkpoint is whole, and the engine goes on.
Result<SleepReport> SleepController::serve_on(FallingAsleep& sleep) {
  SleepReport& report = sleep.report;
  const Status released = catching([&]() -> Status {
    TORPOR_TRY(ranks_.undo(orders::CancelSave{.tags = sleep.save.tags}));  // the memory was only read
    return ok();
  });
  if (!released) return undone(sleep, "checkpoint", released.error());
  sleep.operation.keep();
  if (Status resumed = hooks_.resume(); !resumed) {
    lose(resumed.error());
    return undone(sleep, "checkpoint", std::move(resumed).error());
  }
  set_state(State::kAwake);
  report.kept_blocks = static_cast<int64_t>(sleep.live.kept.size());
  report.changed = true;
  report.fully_awake = true;
  sleep.operation.fill(report);
  sleep.pending->retire_older();  // while the engine runs again
  return std::move(report);
}

// --- held for the word of a front end ---

Result<SleepReport> SleepController::hold_sleep(std::unique_ptr<HeldSleep> sleep) {
  Result<SleepReport> report = catching([&]() -> Result<SleepReport> { return sleep->sleep.report; });
  if (!report) return undone(sleep->sleep, "sleep", std::move(report).error());
  report->held = true;
  held_sleep_ = std::move(sleep);
  return report;
}

Result<SleepReport> SleepController::end_sleep(bool keep) {
  return catching([&] { return end_sleep_now(keep); });
}

Result<SleepReport> SleepController::end_sleep_now(bool keep) {
  const MutexLock in_progress(operation_mutex_);
  if (held_sleep_ == nullptr)
    return Error{.code = Code::kFailedPrecondition, .what = "no sleep is held", .next_step = "sleep with hold first"};
  const std::unique_ptr<HeldSleep> held = std::move(held_sleep_);
  if (keep) return held->only_checkpoint ? serve_on(held->sleep) : fall_asleep(held->sleep);
  const std::string_view call = held->only_checkpoint ? "checkpoint" : "sleep";
  Error error = undone(held->sleep, call, {.code = Code::kAborted, .what = "it was taken back", .next_step = "none"});
  if (error.state_changed) return error;
  SleepReport report;
  report.note = "taken back";
  report.fully_awake = !is_sleeping();
  return report;
}

// The checkpoint that a running engine came from; other checkpoints may go now.
void SleepController::mark_woken(const RestoredFrom& from) noexcept {
  const auto mark = [&]() -> Status {
    TORPOR_ASSIGN(const std::unique_ptr<CheckpointManager> checkpoints, manager(from.directory));
    return checkpoints->woken_from(from.generation);
  };
  Status marked = catching(mark);
  if (!marked) marked = catching(mark);
  if (marked) return;
  (void)catching([&]() -> Status {
    log().warn("older checkpoints were not removed: {}", marked.error().to_string());
    return ok();
  });
}

}  // namespace torpor
