// SPDX-License-Identifier: Apache-2.0
// SleepController: sleep(level, preserve_state) and wake_up, step by step, each all or nothing.
//
// It runs in the process of the scheduler, calls the engine through EngineHooks, and sends orders to the memory of all
// worker ranks. States: awake -> falling asleep -> asleep -> waking -> awake; unrecoverable after a failure that cannot
// be undone. This class has the public calls: it takes the lock, refuses calls that do not fit the engine's state, and
// lets an operation do the rest (sleep_operation.h, wake_operation.h, background_checkpoint.h, swap_out.h).
//
// Threads: any. One operation runs at a time; a second one returns kUnavailable at once, but end_sleep(), end_hold()
// and cancel_checkpoint() wait for it. state() and is_sleeping() may be called at any time. fingerprint() and ledgers()
// take no lock: call them where no other thread calls the engine's hooks.
//
// Failure: a failed call undoes exactly its own steps, in reverse; docs/semantics.md has every case. Nothing is thrown.
// Exceptions of hooks, and a lack of memory or threads, are errors like any other.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/event.h"
#include "base/file_system.h"
#include "base/mutex.h"
#include "engine/background_checkpoint.h"
#include "engine/engine_hooks.h"
#include "engine/operation_context.h"
#include "engine/sleep_controller_options.h"
#include "engine/sleep_report.h"
#include "engine/swap_out.h"

namespace torpor {

class SleepController final {
 public:
  // All references outlive the controller.
  SleepController(EngineHooks& hooks, FileSystem& file_system, const Clock& clock, SleepControllerOptions options,
                  EventPort port = {});
  ~SleepController();

  // Put the engine to sleep. If it is asleep already and this sleep would free no more memory, nothing changes, and the
  // report's note says so. kInvalidArgument: the options are wrong, or contradict each other. kFailedPrecondition: the
  // state of the engine or of its tags does not allow this sleep. kUnsupported: the state of the requests cannot be
  // preserved. kTimeout: a step did not end in time. Other errors: those of hooks, memory and files.
  Result<SleepReport> sleep(const SleepOptions& options);
  // Wake the engine in this process or, with `from_checkpoint`, a new engine from a checkpoint. If it is awake already,
  // nothing changes, and the report's note says so. kFailedPrecondition: the state of the engine does not allow this
  // wake, or the weights were written and `old_kv` is not said. kIncompatible: the checkpoint does not fit this engine.
  // kCorruption: saved bytes are damaged. Other errors: those of hooks, memory and files.
  Result<SleepReport> wake_up(const WakeOptions& options);
  // Write a checkpoint of an engine that serves on: its state and the KV of its requests. The engine is stopped
  // meanwhile, for the report's seconds. An engine that wakes from the checkpoint must have loaded the weights: the
  // checkpoint has them only if a link to the checkpoint before is enough.
  Result<SleepReport> checkpoint(const Value& outputs, DataParallel data_parallel = {},
                                 const std::string& progress = {},
                                 const Metadata& metadata = {});  // as in SleepOptions
  // Write a checkpoint while the engine serves; it is stopped only for its state and for the last blocks.
  //   begin_checkpoint()     opens the checkpoint, in the background
  //   continue_checkpoint()  takes a step, and returns the stage. Call it until it is ready, later until it has ended
  //   take_checkpoint()      if it is ready: stops the engine, copies the rest, and lets the engine go on
  //   end_checkpoint()       if it has ended: returns its report, or its error. Waits for one that was taken
  // The checkpoint is committed or leaves no trace: after an error the other checkpoints and the engine are as they
  // were. A sleep, a wake or another checkpoint cancels a checkpoint that was not taken, and waits for one that was.
  Status begin_checkpoint(const std::string& progress = {}, const Metadata& metadata = {});
  Result<CheckpointStage> continue_checkpoint();
  Status take_checkpoint(const Value& outputs);
  Result<SleepReport> end_checkpoint();
  void cancel_checkpoint() noexcept;  // does nothing once it is committed; else nothing is left of it
  // Carry out (`keep`) or undo a held sleep or checkpoint of a data parallel rank, as all ranks could sleep or not. The
  // report of such a call says that it is held: all content is saved, no memory is released yet, and the engine stands
  // still.
  Result<SleepReport> end_sleep(bool keep);
  // Release the blocks of a post-copy wake that have arrived on all ranks to the engine. Call it between two steps of
  // the engine, on the thread that takes them. kUnavailable: another operation runs. Every other operation first waits
  // for all blocks that are left.
  Result<WakeProgress> continue_wake(DeferredWait wait = DeferredWait::kNone, const DeferredWishes& wishes = {});
  // Put `from` to sleep in host memory, with all that it has, and wake `to`, which is asleep, on the same devices, rank
  // by rank. `to` acquires memory page by page as `from` releases it, so both together never use more than the larger
  // of them needs alone. All or nothing: after an error `from` is awake as before, and `to` is asleep and can be woken.
  // If that is impossible, the error says so, and state() of each engine says how it is.
  //
  // For engines of two processes, call sleep() with `swap_out_to` and wake_up() with `swap_in_from` at the same time.
  // Each call returns when both have succeeded, or when it has undone its own part. If the other process ends, the call
  // undoes its part.
  static Result<SwapReport> swap(SleepController& from, SleepController& to, const SwapOptions& options = {});
  // Return the directory of checkpoints if it has a checkpoint and this engine is new: awake, without a step or a
  // request so far, and not woken from a checkpoint. Otherwise return "".
  Result<std::string> checkpoint_to_wake();
  // Return all values that must be equal for tokens to be equal, with the digest of the weights.
  Result<Fingerprint> fingerprint();
  // After wake_up with `hold`: let the engine run (`keep`), or discard what was restored. The checkpoint counts as
  // woken from only when the engine runs.
  Status end_hold(bool keep);
  // Return what a sleep would move and free, and why it would be refused. The engine and its checkpoints do not change.
  // Like every operation it first waits for the blocks of a post-copy wake. If the sleep is to disk, it does what
  // check_directory() does.
  Result<SleepPlan> plan_sleep(const SleepOptions& options);
  // Check that the hosts of all ranks see the directory of checkpoints. The directory is made if it is absent, and an
  // empty checkpoint is written there and removed. kFailedPrecondition names the rank and its host. kUnavailable:
  // another process writes there. With one rank, or while a checkpoint is being written, nothing is tried.
  Status check_directory();
  // Return what each rank holds, by rank.
  Result<std::vector<RankLedger>> ledgers();
  ControllerState state() const;
  bool is_sleeping() const;  // in any state but awake

 private:
  struct HeldSleep;
  // The engine that wakes in a swap, in this process or in another, as the engine that falls asleep sees it.
  struct OtherEngine {
    std::function<Status()> admit;  // returns an error if the swap is impossible, before anything changes
    std::function<Result<SleepReport>(SleepOperation&, SwapOutEnd&)> swap;
  };

  Result<SleepReport> sleep_now(const SleepOptions& options);
  Result<bool> frees_more(const SleepOptions& options) TORPOR_REQUIRES(operation_mutex_);
  Result<SleepReport> finish_sleep(SleepOperation& sleep) TORPOR_REQUIRES(operation_mutex_);
  Result<SleepReport> serve_on(SleepOperation& sleep) TORPOR_REQUIRES(operation_mutex_);
  Result<SleepReport> checkpoint_now(const SleepOptions& options);
  Result<SleepReport> hold_sleep(std::unique_ptr<HeldSleep> held) TORPOR_REQUIRES(operation_mutex_);
  Result<SleepReport> end_sleep_now(bool keep);
  Result<SleepReport> wake_now(const WakeOptions& options, const SwapIn* swap = nullptr);
  Status end_hold_now(bool keep);
  void end_or_wait_for_checkpoint(std::string_view why) noexcept TORPOR_REQUIRES(operation_mutex_);

  Result<SwapReport> swap_with(SleepController& to, const SwapOptions& options);
  Result<SleepReport> swap_out(const SleepOptions& options);
  Result<SleepReport> swap_in(const WakeOptions& options);
  Result<SwapReport> swap_out_for(const SleepOptions& asked, const OtherEngine& other);
  Result<SwapReport> begin_swap_out(const SleepOptions& asked, const OtherEngine& other, SwapOutEnd& end)
      TORPOR_REQUIRES(operation_mutex_);
  Result<size_t> can_swap_in();
  Result<size_t> count_ranks();

  Error busy() const;  // another operation is in progress
  Status check(const SleepOptions& options) const;
  Status may_begin() const TORPOR_REQUIRES(operation_mutex_);
  Status may_checkpoint(const SleepOptions& options) TORPOR_REQUIRES(operation_mutex_);

  GuardedHooks hooks_;
  RankGroup ranks_;
  const Clock& clock_;
  const SleepControllerOptions options_;
  EngineState state_;
  const EngineParts parts_;

  Mutex operation_mutex_;  // held by the operation in progress; the first in the lock order
  OperationContext context_ TORPOR_GUARDED_BY(operation_mutex_);
  std::unique_ptr<HeldSleep> held_sleep_ TORPOR_GUARDED_BY(operation_mutex_);             // waits for end_sleep()
  std::unique_ptr<BackgroundCheckpoint> background_ TORPOR_GUARDED_BY(operation_mutex_);  // null: none is being written
};

}  // namespace torpor
