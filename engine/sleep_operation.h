// SPDX-License-Identifier: Apache-2.0
// SleepOperation: one sleep, checkpoint or swap-out while it runs. Its steps are a table (sleep_operation.cpp). Each
// step has its phase, a condition, its work, and what undoes it. The modes take different steps:
//
//   sleep         quiesce  capture  commit  save  verify  drop derived  detach
//   checkpoint    quiesce  capture  commit  save  verify
//   swap-out      quiesce  capture  drop derived  save  detach
//
// commit and verify do something only to disk: commit writes the state into the unfinished checkpoint, and verify makes
// it a checkpoint that others see. The save of a swap-out releases the memory page by page.
//
// Owner: the controller's call; the controller, if a front end decides whether the sleep is kept. Threads: one at a
// time. Failure: undone() undoes all steps that were taken, in reverse.
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

// Run `attempt`. If it fails with a lack of memory, and the process that had the memory has `just_ended`, try again for
// some time: the system frees that memory a little later.
Status retry_until_memory_comes(const Clock& clock, bool just_ended, const std::function<Status()>& attempt);

class SleepOperation {
 public:
  // Enter kFallingAsleep. `name`: "sleep" or "checkpoint", in events and errors. `asked` and the context outlive this
  // object. `part_of`: as in Operation.
  SleepOperation(OperationContext& context, std::string_view name, const SleepOptions& asked, uint64_t part_of = 0);

  // Take all steps of a sleep that can be undone without a trace: up to the point where all content is saved and
  // verified.
  Status prepare_sleep();
  // The same for a checkpoint.
  Status prepare_checkpoint();
  // Take all steps of a swap-out before bytes are copied.
  Status prepare_swap_out();
  // Save all content and release the memory through the SwapChannel at `path`, page by page. Call prepare_swap_out()
  // before.
  Status save_for_swap(const std::string& path);

  // Release the memory; the engine is asleep. Older checkpoints may be deleted afterwards (retire_older()).
  Status commit_sleep();
  // Let the engine go on after a checkpoint.
  Status serve_on();
  void retire_older() noexcept;
  // Undo the steps that were taken. Return `error`, with what could not be undone.
  Error undone(Error error) noexcept;

  // For an operation that stops the engine itself (engine/background_checkpoint.h).
  Status quiesce_engine();
  // Return for each rank the bytes of device memory that this sleep releases.
  std::vector<uint64_t> bytes_by_rank() const;
  // The other engine of a swap holds a part of the memory and does not give it back: this operation must not be
  // cancelled any more.
  void forbid_cancel() noexcept { cancel_forbidden_ = true; }
  // The process that acquired memory has ended, perhaps just now: its memory may be free only later.
  void set_memory_comes_late() noexcept { memory_comes_late_ = true; }

  const SleepOptions& options() const { return options_; }
  Operation& operation() { return operation_; }
  SleepReport& report() { return report_; }

 private:
  struct Step;
  enum : size_t { kQuiesce, kCapture, kCommit, kSave, kVerify, kDropDerived, kDetach, kSteps };  // indices in steps_
  static const std::array<Step, kSteps> steps_;
  Status take_steps(size_t first, size_t last);
  Result<uint64_t> take(const Step& step);
  Status not_cancelled() const { return cancel_forbidden_ ? ok() : operation_.go_on(); }

  // Conditions of the steps.
  bool always() const { return true; }
  bool captures() const;
  bool writes_checkpoint() const { return to_disk_ && captures(); }
  bool releases_memory() const { return options_.level > 0; }
  // The steps, each with the bytes that it moved, and what undoes them.
  Result<uint64_t> quiesce();
  Status resume();
  Result<uint64_t> capture();
  Status release_host_slots();
  Result<uint64_t> write_state();
  Status left_to_pending() { return ok(); }  // its destructor removes the checkpoint under construction
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
  const bool deeper_;  // the engine is asleep already, and stays so if this operation fails
  bool preserved_;     // preserve_state; false after the state was discarded
  bool to_disk_;       // false after the sleep to disk failed
  SleepReport report_{};
  Described described_{};
  std::vector<std::string> tags_{};           // tags whose memory is released
  orders::Save save_{};                       // what is copied before the release
  std::vector<std::string> saved_weights_{};  // by rank: digest of the weights that were copied; or empty
  EngineCheckpoint captured_{};
  LiveBlocks live_{};
  std::vector<int32_t> deferrable_{};  // SleepInForce::deferrable_blocks
  std::unique_ptr<CheckpointManager> checkpoints_{};
  std::optional<PendingCheckpoint> pending_{};  // owned to the end: its lock is needed to withdraw it
  std::unique_ptr<File> checkpoint_lock_{};     // PendingCheckpoint::hold_asleep()
  bool cancel_forbidden_ = false;
  bool memory_comes_late_ = false;
  bool checkpoint_stays_ = false;  // it was committed, and could not be withdrawn
  Operation operation_;            // last member: its undo uses all above
};

}  // namespace torpor
