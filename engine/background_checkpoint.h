// SPDX-License-Identifier: Apache-2.0
// BackgroundCheckpoint: a checkpoint that is written while the engine serves. The engine stops once, to capture its
// state and to copy the KV blocks that were not copied before.
//
//   open → open ranks → pre-copy → ready │ stop-and-copy → write → commit → ended
//                                        └ take(), between two steps of the engine
//
// Each step is short. Long work runs in the background: opening, writing the state and the commit here, the rest on the
// ranks (engine/background_writer.h). After a failure or cancel() the checkpoint has ended, and nothing of it is left
// here or on the ranks.
//
// Owner: the operation in progress. Threads: one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/background.h"
#include "base/progress_file.h"
#include "engine/background_events.h"
#include "engine/operation_context.h"
#include "engine/sleep_operation.h"

namespace torpor {

// The stage of a checkpoint that is written while the engine serves.
enum class CheckpointStage : uint8_t { kNone, kCopying, kReady, kWriting, kEnded };

class BackgroundCheckpoint {
 public:
  // `options` name the metadata and the caller's ProgressFile. The context outlives this object.
  BackgroundCheckpoint(OperationContext& context, SleepOptions options);

  // Return the options of every checkpoint that is written while the engine serves.
  static SleepOptions options_of(const std::string& progress, const Metadata& metadata);

  // Open the directory of checkpoints, and begin the checkpoint. Errors: those of CheckpointManager::open().
  Status begin();
  // Take all steps that need no waiting. With `wait`, go on until the checkpoint is ready or has ended.
  Result<CheckpointStage> advance(bool wait);
  // Stop the engine, copy what is left, and let the engine go on. Precondition: ready(). After an error the checkpoint
  // has ended.
  Status take(const Value& outputs);
  // Wait until a checkpoint that was taken has ended, and return its report or its error. Call it once.
  Result<SleepReport> finish();
  // End the checkpoint. If the commit has begun, wait for it instead.
  void cancel() noexcept;
  // Make way for another operation, which `why` names. A checkpoint that was not taken is cancelled; one that was taken
  // is waited for.
  void end_or_wait(std::string_view why) noexcept;

  bool ready() const { return at_ == At::kReady; }
  bool can_finish() const { return at_ == At::kTaken || at_ == At::kCommitting || at_ == At::kEnded; }
  bool ended() const { return at_ == At::kEnded; }
  const std::optional<Error>& error() const { return error_; }  // none before the checkpoint has ended

 private:
  enum class At : uint8_t { kOpening, kOpeningRanks, kPrecopying, kReady, kTaken, kCommitting, kEnded };

  Result<bool> step(bool wait);
  Status describe_engine();
  Status precopy();
  Status stop_and_copy(SleepOperation& sleep);
  Result<std::vector<orders::Save::Reply>> send(orders::Save::Stage stage);
  Result<bool> own_work_ended(bool wait);
  Result<bool> ranks_have_ended(bool wait);
  void choose_tags(const std::vector<std::string>& tags);
  void choose_blocks(KvContents& contents);
  Status read_moment();
  Status write_state();
  Status commit();
  void enter(std::string_view phase) noexcept;
  Error fail(Error error) noexcept;

  OperationContext& context_;
  const EngineParts& engine_;
  const SleepOptions options_;
  At at_ = At::kOpening;
  std::unique_ptr<CheckpointManager> checkpoints_{};
  std::optional<PendingCheckpoint> pending_{};
  Described described_{};        // as of the beginning; a later change of it ends the checkpoint before the stop
  orders::Save save_{};          // the last order to the ranks
  EngineCheckpoint captured_{};  // before the stop: a part of the fingerprint alone
  Moment moment_{};              // of the stop, until it is read
  std::vector<orders::PollSave::Reply> ranks_{};  // the ranks' last answers
  SleepReport report_{};
  std::optional<Error> error_{};  // set once it has ended
  bool stays_ = false;            // it was committed, and could not be withdrawn
  bool published_why_ = false;    // the operation of the stop has published the error's words
  double precopy_seconds_ = 0;    // time for which the engine was stopped to list the blocks of the pre-copy
  uint64_t copied_ = 0;           // bytes copied, by the pre-copy and then by the stop
  std::shared_ptr<ProgressFile> progress_{};  // the caller's; null: there is none
  std::optional<BackgroundEvents> events_{};  // set by begin()
  Background work_;                           // last member: its work uses all above
};

}  // namespace torpor
