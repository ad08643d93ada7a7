// SPDX-License-Identifier: Apache-2.0
// SleepOperation: one sleep, checkpoint or swap-out while it runs. Its steps are a table (sleep_operation.cpp): each
// has its phase, when it is wanted, what it does, and what undoes it. The modes differ in which steps they take:
//
//   sleep         quiesce  capture  commit  save  verify  drop derived  detach
//   checkpoint    quiesce  capture  commit  save  verify
//   swap-out      quiesce  capture  drop derived  save  detach
//
// commit writes the state of a sleep to disk or a checkpoint; verify makes it a checkpoint that others see. In a swap,
// save gives the memory page by page.
//
// Owner: the controller's call, or the controller where a front end has the last word. Threads: one at a time. Failure:
// undone() undoes what was done, in reverse.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine_fingerprint.h"
#include "engine/operation.h"
#include "engine/operation_context.h"

namespace torpor {

// Try again for some time what fails for want of memory, if the process that had the memory has `just_ended`: it is
// free some time after that.
Status retry_until_memory_comes(const Clock& clock, bool just_ended, const std::function<Status()>& attempt);

class SleepOperation {
 public:
  // The engine enters kFallingAsleep. `name`: "sleep" or "checkpoint", in events and errors. `asked` and the context
  // outlive this. `part_of`: as in Operation.
  SleepOperation(OperationContext& context, std::string_view name, const SleepOptions& asked, uint64_t part_of = 0);

  // Everything of a sleep that can be undone without a trace: until all that is kept is saved and verified.
  Status prepare_sleep();
  // The same of a checkpoint.
  Status prepare_checkpoint();
  // Everything of a swap-out before bytes are copied.
  Status prepare_swap_out();
  // Save everything and give the memory through the SwapChannel at `path`, page by page. After prepare_swap_out().
  Status save_giving(const std::string& path);

  // Release the memory: the engine is asleep. Older checkpoints may go after it (retire_older).
  Status commit_sleep();
  // Let the engine go on after a checkpoint.
  Status serve_on();
  void retire_older() noexcept;
  // Undo what was done. Return `error` with what of it stays all the same.
  Error undone(Error error) noexcept;

  // For what stops the engine for a part of its own (engine/background_checkpoint.h).
  Status quiesce_engine();
  // By rank, the bytes of device memory that this sleep releases.
  std::vector<uint64_t> bytes_by_rank() const;
  // The other engine of a swap holds a part of the memory and does not give it back: this one cannot be cancelled.
  void forbid_cancel() noexcept { cancel_forbidden_ = true; }
  // The process that took memory has ended, perhaps just now.
  void set_memory_comes_late() noexcept { memory_comes_late_ = true; }

  const SleepOptions& options() const { return options_; }
  Operation& operation() { return operation_; }
  SleepReport& report() { return report_; }

 private:
  struct Step;
  enum : size_t { kQuiesce, kCapture, kCommit, kSave, kVerify, kDropDerived, kDetach, kSteps };  // places in the table
  static const std::array<Step, kSteps> steps_;
  Status take_steps(size_t first, size_t last);
  Result<uint64_t> take(const Step& step);
  Status not_cancelled() const { return cancel_forbidden_ ? ok() : operation_.go_on(); }

  // When the steps are wanted.
  bool always() const { return true; }
  bool captures() const;
  bool writes_checkpoint() const { return to_disk_ && captures(); }
  bool releases_memory() const { return options_.level > 0; }
  // The steps, each with its bytes, and what undoes them.
  Result<uint64_t> quiesce();
  Status resume();
  Result<uint64_t> capture();
  Status release_host_slots();
  Result<uint64_t> write_state();
  Status nothing() { return ok(); }
  Result<uint64_t> save();
  Status cancel_save();
  Result<uint64_t> verify();
  Status withdraw();
  Result<uint64_t> drop_derived();
  Status rebuild_derived();
  Result<uint64_t> detach();
  Status undo_detach();

  Status admit();
  Status drop();
  void fall_back(const Error& why);
  void say_what_to_load();
  std::vector<std::string> weights_of_kv() noexcept;

  OperationContext& context_;
  const EngineParts& engine_;
  const SleepOptions& options_;
  const std::string_view name_;
  const bool deeper_;  // the engine is asleep already, and stays so if this fails
  bool preserved_;     // the requests' state is kept; false after it was discarded
  bool to_disk_;       // false after that failed
  SleepReport report_{};
  Described described_{};
  std::vector<std::string> tags_{};           // that lose their memory
  orders::Save save_{};                       // what is copied before
  std::vector<std::string> saved_weights_{};  // by rank, the digest of weights that were copied; or empty
  EngineCheckpoint captured_{};
  LiveBlocks live_{};
  std::vector<int32_t> deferrable_{};  // SleepInForce::deferrable_blocks
  std::unique_ptr<CheckpointManager> checkpoints_{};
  std::optional<PendingCheckpoint> pending_{};  // kept to the end: with its lock a commit can be taken back, or older
                                                // ones can go
  bool cancel_forbidden_ = false;
  bool memory_comes_late_ = false;
  bool checkpoint_stays_ = false;  // it was committed, and not taken back
  Operation operation_;            // last: its undo needs all of the above
};

}  // namespace torpor
