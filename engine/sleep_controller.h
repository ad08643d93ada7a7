// SPDX-License-Identifier: Apache-2.0
// SleepController: sleep(level, preserve_state) and wake_up, step by step, each all or nothing.
//
// It lives where the scheduler lives, asks the engine through EngineHooks, and orders the memory of all worker ranks.
// States: awake -> falling asleep -> asleep -> waking -> awake; lost after a failure that cannot be undone.
// A failed call undoes exactly its own steps, in reverse; docs/semantics.md has every case. Nothing is thrown: whatever
// a hook throws, and want of memory or of threads anywhere, is an error like any other.
//
// Threads: one operation at a time, a second one is kUnavailable at once; but end_sleep(), end_hold() and
// cancel_checkpoint() wait for it. state() and is_sleeping() at any time.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/event.h"
#include "base/file_system.h"
#include "base/mutex.h"
#include "base/swap_channel.h"
#include "checkpoint/checkpoint_manager.h"
#include "engine/engine_hooks.h"
#include "engine/guarded_hooks.h"
#include "engine/operation.h"
#include "engine/rank_group.h"
#include "engine/sleep_report.h"
#include "engine/tags.h"

namespace torpor {

struct SleepControllerOptions {
  std::string directory;                    // of checkpoints; empty: sleeping to disk is refused
  std::optional<uint64_t> kv_budget_bytes;  // for cached blocks without a request, per rank; no value: keep all
  CheckpointManagerOptions checkpoints;     // the clock is the controller's; ranks have the key from their own options
  // Weights are read for each checkpoint. Otherwise once, and then only after they were seen to be written.
  bool always_read_weights = false;
  bool own_threads = true;  // off: what is written in the background is, by the thread that asks how far it is
};

// Of a checkpoint that is written while the engine serves.
enum class CheckpointStage : uint8_t { kNone, kCopying, kReady, kWriting, kEnded };

class SleepController final : private Operation::Owner {
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
  Result<WakeProgress> continue_wake(LateWait wait = LateWait::kNone, const LateWishes& wishes = {});
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
  enum class State : uint8_t { kAwake, kFallingAsleep, kAsleep, kWaking, kLost };
  struct FallingAsleep;
  struct HeldSleep;
  struct Behind;
  struct Exchange;
  struct OtherEngine;
  enum class Gone : uint8_t;
  enum class WakeEnd : uint8_t { kStillAsleep, kWaits, kRuns };  // how a wake leaves the engine

  struct RestoredFrom {  // a checkpoint that is marked as woken from once the engine runs
    std::string directory;
    uint64_t generation = 0;
  };

  // sleep(), in this order (sleep_controller_sleep.cpp).
  Status keep_all(FallingAsleep& sleep) TORPOR_REQUIRES(operation_mutex_);
  Status let_go(FallingAsleep& sleep) TORPOR_REQUIRES(operation_mutex_);
  Status admit(FallingAsleep& sleep) TORPOR_REQUIRES(operation_mutex_);
  static Status has_content(const Described& described);
  static Status has_kv(const std::vector<std::string>& tags);
  Status quiesce(FallingAsleep& sleep);
  Status keep(FallingAsleep& sleep) TORPOR_REQUIRES(operation_mutex_);
  void fall_back(FallingAsleep& sleep, const Error& why);
  Status prepare(FallingAsleep& sleep) TORPOR_REQUIRES(operation_mutex_);
  Status all_see(PendingCheckpoint& checkpoint);
  Status seen_by_all(const std::string& directory, size_t ranks) TORPOR_REQUIRES(operation_mutex_);
  Status keep_host_slots(FallingAsleep& sleep);
  void release_host_slots() noexcept;
  Status capture(FallingAsleep& sleep);
  Status save(FallingAsleep& sleep);
  Status prove(FallingAsleep& sleep) TORPOR_REQUIRES(operation_mutex_);
  Status drop(FallingAsleep& sleep);
  Status detach(FallingAsleep& sleep) TORPOR_REQUIRES(operation_mutex_);
  Status release(FallingAsleep& sleep) TORPOR_REQUIRES(operation_mutex_);
  Status undo_detach(const std::vector<std::string>& tags);
  Error undone(FallingAsleep& sleep, std::string_view call, Error error) noexcept;
  Result<SleepReport> sleep_now(const SleepOptions& options);
  Result<bool> frees_more(const SleepOptions& options) TORPOR_REQUIRES(operation_mutex_);
  Result<SleepReport> fall_asleep(FallingAsleep& sleep) TORPOR_REQUIRES(operation_mutex_);
  Result<SleepReport> checkpoint_now(SleepOptions options);
  Result<SleepReport> serve_on(FallingAsleep& sleep) TORPOR_REQUIRES(operation_mutex_);
  Result<SleepReport> hold_sleep(std::unique_ptr<HeldSleep> sleep) TORPOR_REQUIRES(operation_mutex_);
  Result<SleepReport> end_sleep_now(bool keep);

  // A checkpoint while serving (sleep_controller_behind.cpp).
  Status begin_checkpoint_now(const std::string& progress, const Metadata& metadata) TORPOR_REQUIRES(operation_mutex_);
  Result<CheckpointStage> advance(bool wait) TORPOR_REQUIRES(operation_mutex_);
  Status look_ahead() TORPOR_REQUIRES(operation_mutex_);
  Status copy_ahead() TORPOR_REQUIRES(operation_mutex_);
  Result<bool> ranks_have_ended(bool wait) TORPOR_REQUIRES(operation_mutex_);
  Status take_now(const Value& outputs) TORPOR_REQUIRES(operation_mutex_);
  Status stand_still(FallingAsleep& sleep) TORPOR_REQUIRES(operation_mutex_);
  Error fail_behind(Error error) noexcept TORPOR_REQUIRES(operation_mutex_);
  void settle_behind(std::string_view why) noexcept TORPOR_REQUIRES(operation_mutex_);

  // swap() and its halves (sleep_controller_swap.cpp).
  Result<SwapReport> swap_now(SleepController& to, const SwapOptions& options);
  Result<SleepReport> give_now(const SleepOptions& options);
  Result<SleepReport> take_now(const WakeOptions& options);
  Result<SwapReport> leave(const SleepOptions& asked, const OtherEngine& other);
  Result<SwapReport> go_for(const SleepOptions& asked, const OtherEngine& other, Gone& gone)
      TORPOR_REQUIRES(operation_mutex_);
  Result<size_t> may_come();
  Result<size_t> count_ranks();
  Status make_ready(FallingAsleep& sleep) TORPOR_REQUIRES(operation_mutex_);
  Status promise(FallingAsleep& sleep, SwapChannel& room, const std::string& path);
  Status give(FallingAsleep& sleep, SwapChannel& room, bool& failed_first);
  Result<SleepReport> exchange(FallingAsleep& sleep, SleepController& to) TORPOR_REQUIRES(operation_mutex_);
  Result<SleepReport> exchange_by_file(FallingAsleep& sleep, SwapChannel& room, Gone& gone)
      TORPOR_REQUIRES(operation_mutex_);
  Status take_back(FallingAsleep& sleep);
  Status while_memory_comes(const std::function<Status()>& attempt);
  static Status exchanged(const Exchange* exchange, const SleepReport& report);
  static Status committed(const Exchange* exchange);

  // wake_up() (sleep_controller_wake.cpp). `exchange`: memory comes from another engine, which must be asleep before
  // this one is awake.
  Result<SleepReport> wake_now(const WakeOptions& options, const Exchange* exchange = nullptr);
  Result<SleepReport> wake_same_process(const WakeOptions& options, Operation& operation, const Exchange* exchange)
      TORPOR_REQUIRES(operation_mutex_);
  Result<SleepReport> wake_from_checkpoint(const WakeOptions& options, Operation& operation)
      TORPOR_REQUIRES(operation_mutex_);
  Status restore(const WakeOptions& options, Operation& operation, SleepReport& report)
      TORPOR_REQUIRES(operation_mutex_);
  Status finish(const std::vector<std::string>& tags, bool keep_backup, std::vector<RankLedger>& ledgers)
      TORPOR_REQUIRES(operation_mutex_);
  void finished(const std::vector<std::string>& tags) noexcept TORPOR_REQUIRES(operation_mutex_);
  void tell_contents(const Checkpoint& checkpoint) noexcept;
  Status catch_up(const WakeOptions& options, const Checkpoint& checkpoint, SchedulerCheckpoint& state);
  Status undo_restore(const std::vector<std::string>& tags);
  Status drop_old_kv(bool aborts, int64_t requests, Operation& operation);
  // sleep_controller_weights.cpp.
  static void say_what_to_load(FallingAsleep& sleep);
  std::vector<std::string> weights_of_kv(const FallingAsleep& sleep) noexcept TORPOR_REQUIRES(operation_mutex_);
  static std::vector<uint64_t> writes_of(const Described& described);
  Result<bool> look_at_weights(const WakeOptions& options, SleepReport& report) TORPOR_REQUIRES(operation_mutex_);
  Result<bool> are_those_of_kv(const Described& described) TORPOR_REQUIRES(operation_mutex_);
  Result<bool> waits_for(const std::vector<std::string>& reload, const WakeOptions& options)
      TORPOR_REQUIRES(operation_mutex_);
  static std::string warning_of(const std::vector<std::string>& reload, WakeEnd end);
  static std::optional<RestoredFrom> place_of(const std::string& path);
  void mark_woken(const RestoredFrom& from) noexcept;
  Status end_hold_now(bool keep);

  // Blocks that come behind the engine (sleep_controller_late.cpp).
  struct LateBlock {
    int32_t ranks = 0;  // that have not told of it
    BlockArrival worst = BlockArrival::kArrived;
  };
  struct Late {
    std::map<int32_t, LateBlock> left;
    std::vector<uint64_t> seen;  // by rank: so many were told
  };
  Status hold_late(const std::vector<int32_t>& blocks, size_t ranks, Operation& operation)
      TORPOR_REQUIRES(operation_mutex_);
  Result<WakeProgress> take_late(LateWait wait, const LateWishes& wishes = {}) TORPOR_REQUIRES(operation_mutex_);
  Result<bool> take_arrivals(LateWait wait, const LateWishes& wishes, WakeProgress& progress)
      TORPOR_REQUIRES(operation_mutex_);
  Status wait_for_late() TORPOR_REQUIRES(operation_mutex_);
  Status all_arrived(size_t ranks, Operation& operation) TORPOR_REQUIRES(operation_mutex_);
  Status forget_late();

  Result<Fingerprint> fingerprint_now();
  enum class WeightsDigest { kNone, kRead, kReadOrProven };
  Result<Fingerprint> fingerprint_of(const Described& described, WeightsDigest weights);
  // What the ranks have named of the weights, into a fingerprint. False: one has named nothing.
  Result<bool> add_named_weights(Fingerprint& fields, bool as_proven);
  Result<SleepPlan> plan_sleep_now(const SleepOptions& options);
  Error busy() const;  // another operation is in progress
  Status check(const SleepOptions& options) const;
  std::string directory_of(const DataParallel& place) const;
  Result<std::vector<std::string>> select_tags(const std::vector<std::string>& wanted, const RankLedger& ledger) const;
  Status may_begin() const TORPOR_REQUIRES(operation_mutex_);
  Status may_checkpoint(const SleepOptions& options) TORPOR_REQUIRES(operation_mutex_);
  Status can_preserve(std::string_view otherwise);  // kUnsupported, with what to do otherwise, if its state cannot be
  void sign(PendingCheckpoint& checkpoint, const Fingerprint& fingerprint) TORPOR_REQUIRES(operation_mutex_);
  Result<std::unique_ptr<CheckpointManager>> manager(const std::string& directory) const;
  bool is_in(State state) const noexcept;
  void set_state(State state) noexcept;
  void set_state_locked(State state) noexcept TORPOR_REQUIRES(state_mutex_);
  template <class Reply>
  void remember(const std::vector<Reply>& replies) noexcept;
  void lose(const Error& error) noexcept override;
  bool lost() const noexcept override;

  GuardedHooks hooks_;
  FileSystem& file_system_;
  const Clock& clock_;
  const SleepControllerOptions options_;
  const EventPort port_;
  RankGroup ranks_;

  Mutex operation_mutex_;  // held by the operation in progress; first in the lock order
  // Of the sleep in force.
  std::vector<std::string> sleeping_tags_ TORPOR_GUARDED_BY(operation_mutex_);
  std::vector<WorkerSnapshot> workers_ TORPOR_GUARDED_BY(operation_mutex_);
  // Of each rank, when the engine fell asleep (writes_of).
  std::vector<uint64_t> writes_ TORPOR_GUARDED_BY(operation_mutex_);
  // Of each rank, the digest of the weights that KV of then is of; empty: it is not known.
  std::vector<std::string> weights_ TORPOR_GUARDED_BY(operation_mutex_);
  std::vector<std::string> empty_ TORPOR_GUARDED_BY(operation_mutex_);  // tags that will come back without content
  // The last wake over weights that were written was told what becomes of KV: the next one will be.
  bool is_told_ TORPOR_GUARDED_BY(operation_mutex_) = false;
  bool preserved_ TORPOR_GUARDED_BY(operation_mutex_) = false;
  bool took_checkpoint_ TORPOR_GUARDED_BY(operation_mutex_) = false;  // in a wake, for good or to throw it away
  Metadata metadata_ TORPOR_GUARDED_BY(operation_mutex_);             // of the checkpoint of the last sleep
  bool held_ TORPOR_GUARDED_BY(operation_mutex_) = false;
  std::unique_ptr<HeldSleep> held_sleep_ TORPOR_GUARDED_BY(operation_mutex_);
  // What this sleep, or this wake on hold, is of; none: no checkpoint.
  std::optional<RestoredFrom> restored_from_ TORPOR_GUARDED_BY(operation_mutex_);
  // Of this engine's checkpoints: of the one that it went on from, else as its first one has it.
  std::optional<Digest> owner_ TORPOR_GUARDED_BY(operation_mutex_);
  bool derived_released_ TORPOR_GUARDED_BY(operation_mutex_) = false;
  // Of what the sleep in force saved, by need: what an early wake brings back behind the engine.
  std::vector<int32_t> late_blocks_ TORPOR_GUARDED_BY(operation_mutex_);
  std::optional<Late> late_ TORPOR_GUARDED_BY(operation_mutex_);        // of an early wake that is not over
  std::unique_ptr<Behind> behind_ TORPOR_GUARDED_BY(operation_mutex_);  // null: none is written
  std::atomic<bool> memory_comes_late_ = false;  // the process that had it ended, perhaps just now

  mutable Mutex state_mutex_;  // never held while calling out
  State state_ TORPOR_GUARDED_BY(state_mutex_) = State::kAwake;
  ControllerState public_ TORPOR_GUARDED_BY(state_mutex_);
};

}  // namespace torpor
