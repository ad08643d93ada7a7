// SPDX-License-Identifier: Apache-2.0
// SleepController: sleep(level, preserve_state) and wake_up, step by step, each all or nothing.
//
// It lives where the scheduler lives, asks the engine through EngineHooks, and orders the memory of all worker ranks.
// States: awake -> falling asleep -> asleep -> waking -> awake; lost after a failure that cannot be undone.
// A failed call undoes exactly its own steps, in reverse; docs/semantics.md has every case. Nothing is thrown: whatever
// a hook throws, and want of memory or of threads anywhere, is an error like any other.
//
// This class has the public calls: it takes the lock, refuses what does not fit the engine's state, and lets an
// operation do the rest (sleep_operation.h, wake_operation.h, background_checkpoint.h, swap_out.h).
//
// Threads: one operation at a time, a second one is kUnavailable at once; but end_sleep(), end_hold() and
// cancel_checkpoint() wait for it. state() and is_sleeping() at any time.
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

  Result<SleepReport> sleep(const SleepOptions& options);
  Result<SleepReport> wake_up(const WakeOptions& options);
  // A checkpoint of an engine that serves on: its state and the KV of its requests. Weights are named for reload: an
  // engine that wakes from it has loaded them; they are in it only where a link to the checkpoint before is enough. The
  // engine stands still meanwhile; the report's seconds say how long.
  Result<SleepReport> checkpoint(const Value& outputs, DataParallel data_parallel = {},
                                 const std::string& progress = {},
                                 const Metadata& metadata = {});  // as in SleepOptions
  // The same while the engine serves, which stands still for the state and the last blocks alone:
  //   begin_checkpoint()     opens the checkpoint, in the background
  //   continue_checkpoint()  how far it is; takes the next step. Called until it is ready, and until it has ended
  //   take_checkpoint()      of one that is ready: the engine stands still, and goes on
  //   end_checkpoint()       of one that has ended: the report, or why there is none. Waits for one that was taken
  // Committed, or never there: an error leaves the checkpoints and the engine as they were. A sleep, a wake and another
  // checkpoint give up one that was not taken, and wait for one that was.
  Status begin_checkpoint(const std::string& progress = {}, const Metadata& metadata = {});
  Result<CheckpointStage> continue_checkpoint();
  Status take_checkpoint(const Value& outputs);
  Result<SleepReport> end_checkpoint();
  void cancel_checkpoint() noexcept;  // unless it is committed already; nothing is left of it
  // After a sleep or checkpoint of a data parallel rank whose report says that it is held: all is kept, nothing is gone
  // yet, and the engine stands still. Carries it out, or undoes it, as the others could sleep, too, or not.
  Result<SleepReport> end_sleep(bool keep);
  // After an early wake, between two steps of the engine, on the thread that takes them: which blocks have arrived, on
  // all ranks, and releases them to the engine. kUnavailable while another operation runs. Every other operation waits
  // for what is left first.
  Result<WakeProgress> continue_wake(DeferredWait wait = DeferredWait::kNone, const DeferredWishes& wishes = {});
  // `from` falls asleep to host memory with all that it has, and `to`, which is asleep, wakes, on the same devices,
  // rank by rank: `to` takes memory as `from` gives it, page by page, and both together never have more than the larger
  // of them. All or nothing: after an error `from` is awake, as if nothing had been asked, and `to` is asleep and can
  // be woken; where that is not so, the error says so, and state() of each how it is.
  //
  // Engines of two processes: one is told sleep() with `swap_out_to` and the other wake_up() with `swap_in_from`, both
  // at once. Each returns when both have ended well, or when it has undone its own part; the end of the other process
  // undoes it.
  static Result<SwapReport> swap(SleepController& from, SleepController& to, const SwapOptions& options = {});
  // The directory of checkpoints, if it has one and this engine is new: awake, without a step or a request so far, and
  // without a wake from a checkpoint. Else empty.
  Result<std::string> checkpoint_to_wake();
  // All that must be equal for tokens to be equal, the weights' digest included.
  Result<Fingerprint> fingerprint();
  // After wake_up with `hold`: lets the engine run, or throws away what was restored. Only when it runs does the
  // checkpoint count as woken from.
  Status end_hold(bool keep);
  // What a sleep would move and free, and why it would be refused. Changes neither the engine nor its checkpoints; like
  // every operation it first waits for the blocks of an early wake, and to disk it does as check_directory() does.
  Result<SleepPlan> plan_sleep(const SleepOptions& options);
  // Whether the hosts of all ranks see the directory of checkpoints, which is made if need be: looked at by one that is
  // empty and goes again. kFailedPrecondition names the rank, and its host; kUnavailable: somebody else writes there.
  // One rank is not asked, and none while a checkpoint is written, which finds out itself.
  Status check_directory();
  Result<std::vector<RankLedger>> ledgers();
  ControllerState state() const;
  bool is_sleeping() const;

 private:
  struct HeldSleep;
  // The engine that comes, for the one that goes, in this process or in another.
  struct OtherEngine {
    std::function<Status()> admit;  // refuses, before anything is touched
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

  Mutex operation_mutex_;  // held by the operation in progress; first in the lock order
  OperationContext context_ TORPOR_GUARDED_BY(operation_mutex_);
  std::unique_ptr<HeldSleep> held_sleep_ TORPOR_GUARDED_BY(operation_mutex_);             // waits for end_sleep()
  std::unique_ptr<BackgroundCheckpoint> background_ TORPOR_GUARDED_BY(operation_mutex_);  // null: none is written
};

}  // namespace torpor
