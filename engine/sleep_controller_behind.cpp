// SPDX-License-Identifier: Apache-2.0
// A checkpoint that is written while the engine serves. Each step is short: what takes long is done in the background,
// here (opening, the state, the commit) and on the ranks (engine/write_behind.h).
#include <algorithm>

#include <fmt/core.h>

#include "base/background.h"
#include "base/log.h"
#include "base/progress_file.h"
#include "engine/behind_events.h"
#include "engine/phases.h"
#include "engine/sleep_controller.h"
#include "engine/sleep_in_progress.h"

namespace torpor {

struct SleepController::Behind {
  enum class At : uint8_t { kOpening, kOpeningRanks, kAhead, kReady, kTaken, kCommitting, kEnded };
  explicit Behind(bool own_thread) : work(own_thread) {}

  SleepOptions options{.preserve_state = true, .to_disk = true, .weights = Weights::kReload};
  At at = At::kOpening;
  std::unique_ptr<CheckpointManager> checkpoints{};
  std::optional<PendingCheckpoint> pending{};
  Described described{};                           // at its beginning: what makes it otherwise gives it up first
  orders::Save save{};                             // of the last order to the ranks
  EngineCheckpoint captured{};                     // until the stop it has a part of the fingerprint alone
  Moment moment{};                                 // of the stop, until it is read
  std::vector<orders::LookBehind::Reply> ranks{};  // what they said last
  SleepReport report{};
  std::optional<Error> error{};              // once it has ended
  bool stays = false;                        // it was committed, and could not be taken back
  bool told_why = false;                     // in words, by the operation of the stop
  double stood_before = 0;                   // seconds, to see what can be copied ahead
  uint64_t copied = 0;                       // bytes, ahead, then in the stop
  std::shared_ptr<ProgressFile> progress{};  // of who asked; null: nobody watches
  std::optional<BehindEvents> events{};      // once it was begun
  Background work;                           // last: it uses all above

  // Blocks first: the ranks know their contents by place.
  void say_what_is_saved(const std::vector<std::string>& tags, bool as_proven) {
    for (const std::string& tag : tags) {
      if (!is_scratch(tag)) (tag == kWeightsTag ? save.carried : save.tags).push_back(tag);
    }
    std::stable_partition(save.tags.begin(), save.tags.end(),
                          [](const std::string& tag) { return tag == kKvCacheTag; });
    save.directory = pending->staging_path();
    save.writing = pending->writing();
    save.as_proven = as_proven;
  }
  void say_which_blocks(KvContents& contents) {
    save.blocks = std::move(contents.blocks);
    save.stamps = std::move(contents.stamps);
    save.steps = contents.steps;
  }
  Status read_moment();
  Status write_state();
  Status commit(FileSystem& file_system, const std::shared_ptr<const Key>& key);
  void enter(std::string_view phase) noexcept {
    if (progress != nullptr) progress->begin_phase(number_of(phase, kPhaseNames));
    events->enter(phase);
  }
};

SleepController::SleepController(EngineHooks& hooks, FileSystem& file_system, const Clock& clock,
                                 SleepControllerOptions options, EventPort port)
    : hooks_(hooks),
      file_system_(file_system),
      clock_(clock),
      options_(std::move(options)),
      port_(port),
      ranks_(hooks_) {}

// What is held is undone: the requests go on, if anybody can still ask for them.
SleepController::~SleepController() {
  cancel_checkpoint();
  held_sleep_.reset();
}

Status SleepController::Behind::read_moment() {
  TORPOR_ASSIGN(captured.state, std::exchange(moment, {}).read());
  return captured.state.validate();
}

Status SleepController::Behind::write_state() {
  if (moment.read) TORPOR_TRY(read_moment());
  return pending->write_state(captured);
}

// The whole of it, or nothing: what is committed and cannot be told of is taken away again.
Status SleepController::Behind::commit(FileSystem& file_system, const std::shared_ptr<const Key>& key) {
  const Status committed = catching([&]() -> Status {
    for (const orders::LookBehind::Reply& rank : ranks) {
      for (const auto& [tag, sums] : rank.saved.saved.tags) report.checkpoint_parts[tag] += sums.stored_bytes;
      report.saved_bytes += rank.saved.bytes;
      report.compacted_bytes += rank.saved.compacted_bytes;
      report.reused_bytes += rank.saved.reused_bytes;
      pending->add_rank(rank.saved.saved);
    }
    report.disk_bytes = report.saved_bytes + report.reused_bytes;
    stays = true;
    TORPOR_ASSIGN(report.checkpoint, pending->commit());
    TORPOR_ASSIGN(const Checkpoint made, open_checkpoint(file_system, report.checkpoint, key));
    report.checkpoint_bytes = made.manifest().total_bytes();
    report.metadata = captured.metadata;
    for (const SectionInfo& section : made.manifest().sections)
      report.checkpoint_parts[section.name] = section.stored_bytes;
    return ok();
  });
  if (!committed) {
    if (pending->withdraw() || pending->withdraw()) stays = false;
    return committed;
  }
  pending->retire_older();
  return ok();
}

Status SleepController::begin_checkpoint(const std::string& progress, const Metadata& metadata) {
  return catching([&]() -> Status {
    if (!operation_mutex_.try_lock()) return busy();
    const MutexLock in_progress(operation_mutex_, std::adopt_lock);
    return begin_checkpoint_now(progress, metadata);
  });
}

Status SleepController::begin_checkpoint_now(const std::string& progress, const Metadata& metadata) {
  auto behind = std::make_unique<Behind>(options_.own_threads);
  behind->options.metadata = metadata;
  TORPOR_TRY(may_checkpoint(behind->options));
  if (behind_ != nullptr && behind_->at != Behind::At::kEnded)
    return Error{.code = Code::kUnavailable,
                 .what = "a checkpoint is being written",
                 .next_step = "wait for it to end, or cancel it"};
  TORPOR_TRY(can_preserve("serve without these features"));
  behind->options.progress = progress;
  behind->progress = ProgressFile::of_caller(progress);
  TORPOR_ASSIGN(behind->checkpoints, manager(options_.directory));
  Behind* const made = behind.get();
  TORPOR_TRY(made->work.begin([made]() -> Status {
    TORPOR_ASSIGN(made->pending, made->checkpoints->begin(0));
    return ok();
  }));
  made->events.emplace(clock_, port_);
  made->enter("open");
  behind_ = std::move(behind);
  return ok();
}

Result<CheckpointStage> SleepController::continue_checkpoint() {
  return catching([this]() -> Result<CheckpointStage> {
    if (!operation_mutex_.try_lock()) return busy();
    const MutexLock in_progress(operation_mutex_, std::adopt_lock);
    return advance(/*wait=*/false);
  });
}

// As far as it goes without waiting, or until it is ready or has ended.
Result<CheckpointStage> SleepController::advance(bool wait) {
  using At = Behind::At;
  if (behind_ == nullptr) return CheckpointStage::kNone;
  Behind& behind = *behind_;
  const bool may_have_ended = wait || !options_.own_threads;  // what the ranks have just begun
  const auto own_work_ended = [&]() -> Result<bool> {
    if (!wait && !behind.work.ended()) return false;
    TORPOR_TRY(behind.work.wait());
    return true;
  };
  const auto step = [&]() TORPOR_REQUIRES(operation_mutex_) -> Result<bool> {
    if (behind.progress != nullptr && behind.at != At::kCommitting && behind.at != At::kEnded)
      TORPOR_TRY(behind.progress->check());
    switch (behind.at) {
      case At::kOpening: {
        TORPOR_ASSIGN(const bool opened, own_work_ended());
        if (!opened) return false;
        TORPOR_TRY(look_ahead());
        TORPOR_TRY(ranks_.call(orders::OpenBehind{.directory = behind.pending->staging_path(),
                                                  .writing = behind.pending->writing(),
                                                  .progress = behind.options.progress}));
        behind.at = At::kOpeningRanks;
        return may_have_ended;
      }
      case At::kOpeningRanks: {
        TORPOR_ASSIGN(const bool opened, ranks_have_ended(wait));
        if (!opened) return false;
        TORPOR_TRY(behind.pending->see_chunks(behind.ranks.size()));
        behind.events->leave();
        behind.enter("save");
        TORPOR_TRY(copy_ahead());
        behind.at = At::kAhead;
        return may_have_ended;
      }
      case At::kAhead: {
        TORPOR_ASSIGN(const bool copied, ranks_have_ended(wait));
        if (!copied) return false;
        behind.events->leave(behind.copied);
        behind.at = At::kReady;
        return true;
      }
      case At::kTaken: {
        TORPOR_ASSIGN(const bool written, ranks_have_ended(wait));
        if (!written) return false;
        TORPOR_ASSIGN(const bool state_written, own_work_ended());
        if (!state_written) return false;
        behind.at = At::kCommitting;
        behind.events->leave(behind.copied);
        behind.enter("verify");
        TORPOR_TRY(
            behind.work.begin([this, &behind] { return behind.commit(file_system_, options_.checkpoints.key); }));
        return true;
      }
      case At::kCommitting: {
        TORPOR_ASSIGN(const bool committed, own_work_ended());
        if (!committed) return false;
        behind.at = At::kEnded;
        behind.events->leave();
        behind.events->end(Edge::kEnd, {});
        behind.pending.reset();  // with the lock of its directory
        (void)catching([&]() -> Status {
          const auto stopped = ranks_.undo(orders::LookBehind{.stop = true});
          if (!stopped) log().warn("{}", stopped.error().to_string());
          return ok();
        });
        return true;
      }
      case At::kReady:
      case At::kEnded: return false;
    }
    return false;
  };
  while (true) {
    Result<bool> stepped = catching(step);
    if (!stepped) {
      fail_behind(std::move(stepped).error());
    } else if (*stepped) {
      continue;
    }
    switch (behind.at) {
      case At::kReady: return CheckpointStage::kReady;
      case At::kTaken:
      case At::kCommitting: return CheckpointStage::kWriting;
      case At::kEnded: return CheckpointStage::kEnded;
      default: return CheckpointStage::kCopying;
    }
  }
}

Result<bool> SleepController::ranks_have_ended(bool wait) {
  TORPOR_ASSIGN(behind_->ranks, ranks_.call(orders::LookBehind{.wait = wait}));
  for (const orders::LookBehind::Reply& rank : behind_->ranks) {
    if (!rank.ended) return false;
  }
  return true;
}

// What an engine is as long as nothing gives the checkpoint up.
Status SleepController::look_ahead() {
  Behind& behind = *behind_;
  TORPOR_ASSIGN(behind.described, ranks_.call(orders::Describe{}));
  remember(behind.described);
  TORPOR_TRY(has_content(behind.described));
  TORPOR_ASSIGN(const std::vector<std::string> tags, select_tags({}, behind.described.front().ledger));
  TORPOR_TRY(has_kv(tags));
  behind.say_what_is_saved(tags, !options_.always_read_weights);
  TORPOR_ASSIGN(behind.captured.fingerprint, fingerprint_of(behind.described, WeightsDigest::kNone));
  return ok();
}

// Between two steps, with none in flight: what has a stamp by then was computed.
Status SleepController::copy_ahead() {
  const std::chrono::nanoseconds began = clock_.now();
  const Status asked = catching([&]() TORPOR_REQUIRES(operation_mutex_) -> Status {
    TORPOR_TRY(hooks_.quiesce(std::nullopt));
    Behind& behind = *behind_;
    if (options_.kv_budget_bytes) {
      TORPOR_ASSIGN(const SchedulerCheckpoint state, hooks_.capture());
      TORPOR_TRY(state.validate());
      const LiveBlocks live =
          select_live_blocks(state.kv, block_bytes(behind.described).most, options_.kv_budget_bytes);
      name_blocks(behind.save, state, live.kept);
    } else {
      TORPOR_ASSIGN(KvContents contents, hooks_.kv_contents());
      behind.say_which_blocks(contents);
    }
    TORPOR_ASSIGN(const std::vector<orders::CopyAhead::Reply> copied,
                  ranks_.call(orders::CopyAhead{.save = behind.save}));
    behind.copied = total_bytes(copied);
    return ok();
  });
  if (const Status resumed = hooks_.resume(); !resumed) {
    lose(resumed.error());
    return resumed.error();
  }
  behind_->stood_before = seconds_between(began, clock_.now());
  return asked;
}

Status SleepController::take_checkpoint(const Value& outputs) {
  return catching([&]() -> Status {
    if (!operation_mutex_.try_lock()) return busy();
    const MutexLock in_progress(operation_mutex_, std::adopt_lock);
    return take_now(outputs);
  });
}

Status SleepController::take_now(const Value& outputs) {
  if (behind_ != nullptr && behind_->at == Behind::At::kEnded && behind_->error) return *behind_->error;
  TORPOR_TRY(may_begin());
  if (behind_ == nullptr || behind_->at != Behind::At::kReady)
    return Error{.code = Code::kFailedPrecondition,
                 .what = "no checkpoint is ready to be taken",
                 .next_step = "begin one, and continue it until it is ready"};
  Behind& behind = *behind_;
  behind.captured.outputs = outputs;
  behind.captured.metadata = behind.options.metadata;
  FallingAsleep sleep(*this, "checkpoint", behind.options, behind.events->number());
  set_state(State::kFallingAsleep);
  Status stood = catching([&]() TORPOR_REQUIRES(operation_mutex_) { return stand_still(sleep); });
  behind.told_why = !stood;
  if (!stood) return fail_behind(undone(sleep, "checkpoint", std::move(stood).error()));
  sleep.operation.keep();
  if (Status resumed = hooks_.resume(); !resumed) {
    lose(resumed.error());
    behind.told_why = true;
    return fail_behind(undone(sleep, "checkpoint", std::move(resumed).error()));
  }
  set_state(State::kAwake);
  sleep.operation.fill(sleep.report);
  behind.report = std::move(sleep.report);
  behind.report.seconds += behind.stood_before;
  behind.at = Behind::At::kTaken;
  behind.enter("commit");
  Status begun = behind.work.begin([&behind] { return behind.write_state(); });
  return begun ? ok() : Status(fail_behind(std::move(begun).error()));
}

// As short as it can be: what the engine is was asked before, and what takes long of its state is read after.
Status SleepController::stand_still(FallingAsleep& sleep) {
  Behind& behind = *behind_;
  sleep.report.to = "disk";
  sleep.report.preserve_state = true;
  sleep.report.changed = true;
  sleep.report.fully_awake = true;
  TORPOR_TRY(can_preserve("serve without these features"));  // requests may have come since
  TORPOR_TRY(quiesce(sleep));
  sleep.operation.begin("capture");
  TORPOR_ASSIGN(behind.moment, hooks_.capture_moment());
  if (options_.kv_budget_bytes) {
    TORPOR_TRY(behind.read_moment());
    KvSnapshot& kv = behind.captured.state.kv;
    const LiveBlocks live = select_live_blocks(kv, block_bytes(behind.described).most, options_.kv_budget_bytes);
    drop_hashes(kv, live.dropped);
    name_blocks(behind.save, behind.captured.state, live.kept);
  } else {
    behind.say_which_blocks(behind.moment.kv);
  }
  sleep.operation.end("capture");
  TORPOR_TRY(sleep.operation.go_on());
  sleep.operation.begin("save");
  TORPOR_ASSIGN(const std::vector<orders::SaveBehind::Reply> saved,
                ranks_.call(orders::SaveBehind{.save = behind.save}));
  if (!behind.save.carried.empty()) add_weights(behind.captured.fingerprint, saved);
  sign(*behind.pending, behind.captured.fingerprint);
  sleep.report.kept_blocks = static_cast<int64_t>(behind.save.blocks.size());
  behind.copied = total_bytes(saved);
  sleep.operation.end("save", behind.copied);
  return ok();
}

Result<SleepReport> SleepController::end_checkpoint() {
  return catching([this]() -> Result<SleepReport> {
    if (!operation_mutex_.try_lock()) return busy();
    const MutexLock in_progress(operation_mutex_, std::adopt_lock);
    using At = Behind::At;
    if (behind_ == nullptr ||
        (behind_->at != At::kTaken && behind_->at != At::kCommitting && behind_->at != At::kEnded))
      return Error{.code = Code::kFailedPrecondition,
                   .what = "no checkpoint was taken",
                   .next_step = "begin one, continue it until it is ready, and take it"};
    while (behind_->at != At::kEnded) TORPOR_TRY(advance(/*wait=*/true));
    const std::unique_ptr<Behind> ended = std::move(behind_);
    if (ended->error) return std::move(*ended->error);  // a copy could fail, and would not say what has changed
    return std::move(ended->report);
  });
}

void SleepController::cancel_checkpoint() noexcept {
  const MutexLock in_progress(operation_mutex_);
  if (behind_ == nullptr) return;
  if (behind_->at == Behind::At::kCommitting) {
    settle_behind("");
  } else if (behind_->at != Behind::At::kEnded) {
    fail_behind({.code = Code::kAborted, .what = "cancelled"});
  }
  behind_.reset();
}

// It is over, and nothing of it is left: neither here nor on the ranks. Takes no memory that it needs. Returns the
// error, without words if there is no memory for them.
Error SleepController::fail_behind(Error error) noexcept {
  Behind& behind = *behind_;
  const Status stopped = catching([&]() -> Status {
    TORPOR_TRY(ranks_.undo(orders::LookBehind{.stop = true}));
    return ok();
  });
  (void)behind.work.wait();
  behind.pending.reset();
  error.state_changed = behind.stays || lost();
  behind.error = std::move(error);
  behind.at = Behind::At::kEnded;
  behind.events->end(lost() ? Edge::kLost : Edge::kFailed, behind.told_why ? std::string_view() : behind.error->what);
  (void)catching([&]() -> Status {
    if (!stopped) log().warn("{}", stopped.error().to_string());
    if (behind.stays) behind.error->what += fmt::format("; its checkpoint is {}", behind.report.checkpoint);
    return ok();
  });
  Error told{.code = behind.error->code, .state_changed = behind.error->state_changed};
  (void)catching([&]() -> Status {
    told = *behind.error;
    return ok();
  });
  return told;
}

// Before another operation. Who asked for the checkpoint is told of its end when they ask.
void SleepController::settle_behind(std::string_view why) noexcept {
  using At = Behind::At;
  if (behind_ == nullptr || behind_->at == At::kEnded) return;
  if (behind_->at != At::kTaken && behind_->at != At::kCommitting) {
    Error error{.code = Code::kAborted};
    (void)catching([&]() -> Status {
      error.next_step = "ask for it again";
      error.what = fmt::format("the checkpoint was given up: {}", why);
      return ok();
    });
    fail_behind(std::move(error));
    return;
  }
  while (behind_->at != At::kEnded) {
    auto advanced = catching([&]() TORPOR_REQUIRES(operation_mutex_) { return advance(/*wait=*/true); });
    if (!advanced) fail_behind(std::move(advanced).error());
  }
}

}  // namespace torpor
