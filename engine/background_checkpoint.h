// SPDX-License-Identifier: Apache-2.0
// BackgroundCheckpoint: a checkpoint that is written while the engine serves. The engine stops once, for its state and
// for the KV blocks that were not copied before.
//
//   open → open ranks → pre-copy → ready │ stop-and-copy → write → commit → ended
//                                        └ take(), between two steps of the engine
//
// Each step is short: what takes long is done in the background, here (opening, the state, the commit) and on the ranks
// (engine/background_writer.h). A failure, or cancel(), ends it: nothing of it is left, here or on the ranks.
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

// How far a checkpoint is that is written while the engine serves.
enum class CheckpointStage : uint8_t { kNone, kCopying, kReady, kWriting, kEnded };

class BackgroundCheckpoint {
 public:
  // `options` name metadata and the file of who watches. The context outlives this.
  BackgroundCheckpoint(OperationContext& context, SleepOptions options);

  // Return what every checkpoint of an engine that serves asks for.
  static SleepOptions options_of(const std::string& progress, const Metadata& metadata);

  Status begin();
  // Go as far as it goes without waiting; or, with `wait`, until it is ready or has ended.
  Result<CheckpointStage> advance(bool wait);
  // Stop the engine, copy what is left, let it go on. Precondition: ready(). After an error it has ended.
  Status take(const Value& outputs);
  // Wait for the end of one that was taken, and return how it ended. Once.
  Result<SleepReport> finish();
  // End it, unless it is being committed: then wait for that.
  void cancel() noexcept;
  // Make way for another operation, `why`: give it up, or wait for it if it was taken.
  void end_or_wait(std::string_view why) noexcept;

  bool ready() const { return at_ == At::kReady; }
  bool can_finish() const { return at_ == At::kTaken || at_ == At::kCommitting || at_ == At::kEnded; }
  bool ended() const { return at_ == At::kEnded; }
  const std::optional<Error>& error() const { return error_; }  // none before it has ended

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
  Described described_{};                         // at its beginning: what changes it later ends this first
  orders::Save save_{};                           // of the last order to the ranks
  EngineCheckpoint captured_{};                   // until the stop it has a part of the fingerprint alone
  Moment moment_{};                               // of the stop, until it is read
  std::vector<orders::PollSave::Reply> ranks_{};  // what they said last
  SleepReport report_{};
  std::optional<Error> error_{};              // once it has ended
  bool stays_ = false;                        // it was committed, and could not be taken back
  bool told_why_ = false;                     // in words, by the operation of the stop
  double precopy_seconds_ = 0;                // that the engine stood still to see what can be copied before
  uint64_t copied_ = 0;                       // bytes, before, then in the stop
  std::shared_ptr<ProgressFile> progress_{};  // of who asked; null: nobody watches
  std::optional<BackgroundEvents> events_{};  // once it was begun
  Background work_;                           // last: it uses all above
};

}  // namespace torpor
