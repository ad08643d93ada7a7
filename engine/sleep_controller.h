// SleepController: sleep(level, preserve_state) and wake_up, step by step, each all or nothing.
//
// It lives where the scheduler lives, asks the engine through EngineHooks, and orders the memory of all worker ranks.
// States: awake -> falling asleep -> asleep -> waking -> awake; lost after a failure that cannot be undone.
// A failed call undoes exactly its own steps, in reverse; docs/semantics.md has every case.
//
// Threads: one operation at a time, a second one is kUnavailable at once; state() and is_sleeping() at any time.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/event_sink.h"
#include "base/file_system.h"
#include "checkpoint/checkpoint_manager.h"
#include "engine/engine_hooks.h"
#include "engine/rank_group.h"

namespace torpor {

inline constexpr const char* kWeightsTag = "weights";
inline constexpr const char* kKvCacheTag = "kv_cache";

struct SleepOptions {
  int level = 1;                // 0: only pause; 1 and 2: SEMANTICS, section "Calls"
  bool preserve_state = false;
  bool to_disk = false;
  std::string in_flight = "freeze";   // without preserve_state: "abort" or "recompute"
  bool discard_on_save_error = false;
  bool store_weights = true;          // to disk: false names them for reload instead
  std::vector<std::string> tags;      // empty: all
  std::optional<double> timeout_seconds;  // for the quiesce
  Value outputs;                      // the front end's part of the checkpoint
};

struct WakeOptions {
  std::vector<std::string> tags;  // empty: all that sleep
  std::string from_checkpoint;    // a checkpoint or a directory of checkpoints; for a new, empty engine
  bool discard_on_restore_error = false;
  bool weights_changed = false;   // new weights were loaded: KV computed with the old ones is stale
  bool hold = false;              // restored, but not yet running: end_hold() follows
};

struct Phase {
  std::string name;
  double seconds = 0;
  uint64_t bytes = 0;
};

struct SleepReport {  // also of a wake
  bool changed = false;
  bool fully_awake = false;
  std::string note;  // why nothing changed, or what was discarded
  int level = 0;
  bool preserve_state = false;
  std::string to;          // "host" or "disk"
  std::string checkpoint;  // path, if there is one
  uint64_t checkpoint_bytes = 0;
  std::map<std::string, uint64_t> checkpoint_parts;  // section or tag -> stored bytes
  int64_t requests = 0;
  uint64_t saved_bytes = 0;
  uint64_t freed_bytes = 0;     // device memory
  uint64_t restored_bytes = 0;
  int64_t kept_blocks = 0;
  int64_t dropped_blocks = 0;   // cached blocks whose bytes were not kept
  std::vector<std::string> reload;  // tags that came back without content: the owner must load them
  std::vector<FailedRequest> failed_requests;
  Value outputs;                // of a restored checkpoint
  std::vector<Phase> phases;
  double seconds = 0;
  std::vector<RankLedger> ledgers;  // by rank, at the end
};

struct SleepPlan {
  std::map<std::string, uint64_t> save_bytes;  // tag -> bytes that would be copied, all ranks together
  std::map<std::string, uint64_t> free_bytes;  // tag -> device bytes that would be given back
  int64_t requests = 0;
  int64_t kept_blocks = 0;
  int64_t dropped_blocks = 0;
  std::vector<std::string> problems;  // why it would be refused
};

struct ControllerState {
  std::string engine;  // "awake", "falling asleep", "asleep", "waking", "lost"
  std::map<std::string, std::string> tags;
  int level = -1;  // of the sleep in force
  std::string checkpoint;
};

struct SleepControllerOptions {
  std::string directory;                         // of checkpoints; empty: sleeping to disk is refused
  std::optional<uint64_t> kv_budget_bytes;       // for cached blocks without a request, per rank; no value: keep all
  int keep_checkpoints = 2;
};

class SleepController {
 public:
  // All references outlive the controller. `sink` may be null.
  SleepController(EngineHooks& hooks, FileSystem& file_system, const Clock& clock, SleepControllerOptions options, EventSink* sink = nullptr);

  Result<SleepReport> sleep(const SleepOptions& options);
  Result<SleepReport> wake_up(const WakeOptions& options);
  // After wake_up with `hold`: lets the engine run, or throws away what was restored.
  Status end_hold(bool keep);
  Result<SleepPlan> plan_sleep(const SleepOptions& options);
  Result<std::vector<RankLedger>> ledgers();
  ControllerState state() const;
  bool is_sleeping() const;

 private:
  enum class State : uint8_t { kAwake, kFallingAsleep, kAsleep, kWaking, kLost };
  class Operation;
  struct Captured;

  Result<SleepReport> fall_asleep(const SleepOptions& options, Operation& operation);
  Result<Captured> capture(const SleepOptions& options, Operation& operation);
  Result<SleepReport> wake_same_process(const WakeOptions& options, Operation& operation);
  Result<SleepReport> wake_from_checkpoint(const WakeOptions& options, Operation& operation);
  Status check(const SleepOptions& options) const;
  Result<std::vector<std::string>> select_tags(const std::vector<std::string>& wanted, const RankLedger& ledger) const;
  Result<Fingerprint> fingerprint();
  Result<std::unique_ptr<CheckpointManager>> manager(const std::string& directory) const;
  Status undo_detach(const std::vector<std::string>& tags);
  void set_state(State state);
  void remember(const std::vector<RankReply>& replies);
  void lose(const Error& error);
  bool lost() const;

  EngineHooks& hooks_;
  FileSystem& file_system_;
  const Clock& clock_;
  const SleepControllerOptions options_;
  EventSink* const sink_;
  RankGroup ranks_;

  std::mutex operation_mutex_;  // held by the operation in progress; first in the lock order
  // Of the sleep in force; only the operation in progress touches them.
  std::vector<std::string> sleeping_tags_;
  std::vector<WorkerSnapshot> workers_;
  bool preserved_ = false;
  bool held_ = false;
  bool derived_released_ = false;

  mutable std::mutex state_mutex_;  // guards all below; never held while calling out
  State state_ = State::kAwake;
  ControllerState public_;
};

}  // namespace torpor
