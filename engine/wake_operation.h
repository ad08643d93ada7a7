// SPDX-License-Identifier: Apache-2.0
// WakeOperation: one wake while it runs: of an engine that sleeps in this process, or of a new engine from a
// checkpoint.
//
//   this process   restore   reconnect   finish, resume      restore: memory and content come back
//   a checkpoint   open   quiesce   restore   reconnect   resume
//
// A wake of this process may end before the engine runs, if some tags stay asleep or the weights must be loaded first.
// Failure: a failed wake undoes itself and nothing else. From finish on it cannot be undone, as a rank that has carried
// finish out has no way back.
//
// Owner: the controller's call. Threads: one.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/operation.h"
#include "engine/operation_context.h"

namespace torpor {

// For a wake that acquires its memory from another engine, which must be asleep before this engine runs.
struct SwapIn {
  std::string channel;                        // path of the SwapChannel
  std::function<Status()> wait_until_asleep;  // waits until the other engine is asleep
  std::function<Status()> commit{};           // called before this engine runs and does what cannot be undone
};

class WakeOperation {
 public:
  // Enter kWaking. All arguments outlive this object. `swap`: null for a wake without a swap.
  WakeOperation(OperationContext& context, const WakeOptions& options, const SwapIn* swap);

  // Wake, or undo all steps. Call it once.
  Result<SleepReport> run();

 private:
  enum class End : uint8_t { kStillAsleep, kWaits, kRuns };  // the state in which a wake leaves the engine

  // A wake of this process.
  Result<SleepReport> wake_this_process();
  Result<std::vector<std::string>> tags_that_wake() const;
  Status restore_memory(const std::vector<std::string>& tags, const std::vector<int32_t>& deferred);
  Status undo_restore(const std::vector<std::string>& tags);
  Result<SleepReport> end_early(const std::vector<std::string>& tags, std::vector<std::string> still_asleep);
  Status reconnect(bool kv_of_old_weights);
  Status drop_old_kv();
  Status finish(const std::vector<std::string>& tags);
  void finished(const std::vector<std::string>& tags) noexcept;
  void let_run(bool weights_were_written) noexcept;
  Result<bool> has_other_weights();
  Result<bool> waits_for_weights();
  std::string warning_of(End end) const;

  // A wake from a checkpoint.
  Result<SleepReport> wake_from_checkpoint();
  Status restore_checkpoint();
  Status open(std::optional<Checkpoint>& checkpoint, EngineCheckpoint& state);
  Status catch_up(const Checkpoint& checkpoint, CapturedState& state);
  void send_contents(const Checkpoint& checkpoint) noexcept;

  bool kv_is_said() const { return options_.old_kv != OldKv::kUnsaid; }
  bool drops_kv() const { return options_.old_kv == OldKv::kRecompute || options_.old_kv == OldKv::kAbort; }

  OperationContext& context_;
  const EngineParts& engine_;
  const WakeOptions& options_;
  const SwapIn* const swap_;
  const EngineState::At before_;
  SleepReport report_{};
  size_t ranks_ = 0;
  Operation operation_;  // last: its undo needs all of the above
};

}  // namespace torpor
