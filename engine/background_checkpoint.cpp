// SPDX-License-Identifier: Apache-2.0
#include "engine/background_checkpoint.h"

#include <algorithm>

#include <fmt/core.h>

#include "base/log.h"
#include "engine/phases.h"

namespace torpor {

BackgroundCheckpoint::BackgroundCheckpoint(OperationContext& context, SleepOptions options)
    : context_(context),
      engine_(context.engine),
      options_(std::move(options)),
      progress_(ProgressFile::of_caller(options_.progress)),
      work_(engine_.options.own_threads) {}

SleepOptions BackgroundCheckpoint::options_of(const std::string& progress, const Metadata& metadata) {
  return {
      .preserve_state = true, .to_disk = true, .weights = Weights::kReload, .metadata = metadata, .progress = progress};
}

Status BackgroundCheckpoint::begin() {
  TORPOR_ASSIGN_OR_RETURN(checkpoints_, context_.checkpoints.open(engine_.options.directory));
  TORPOR_RETURN_IF_ERROR(work_.begin([this]() -> Status {
    TORPOR_ASSIGN_OR_RETURN(pending_, checkpoints_->begin(0));
    return ok();
  }));
  events_.emplace(engine_.clock, engine_.port);
  enter("open");
  return ok();
}

Result<CheckpointStage> BackgroundCheckpoint::advance(bool wait) {
  while (true) {
    Result<bool> stepped = try_catch([&] { return step(wait); });
    if (!stepped) {
      fail(std::move(stepped).error());
    } else if (*stepped) {
      continue;
    }
    switch (at_) {
      case At::kReady: return CheckpointStage::kReady;
      case At::kTaken:
      case At::kCommitting: return CheckpointStage::kWriting;
      case At::kEnded: return CheckpointStage::kEnded;
      default: return CheckpointStage::kCopying;
    }
  }
}

// Take the next step if the work that it waits for has ended. Return whether another step may follow.
Result<bool> BackgroundCheckpoint::step(bool wait) {
  const bool may_have_ended = wait || !engine_.options.own_threads;  // the work that the ranks have just begun
  if (progress_ != nullptr && at_ != At::kCommitting && at_ != At::kEnded) TORPOR_RETURN_IF_ERROR(progress_->check());
  switch (at_) {
    case At::kOpening: {
      TORPOR_ASSIGN_OR_RETURN(const bool opened, own_work_ended(wait));
      if (!opened) return false;
      TORPOR_RETURN_IF_ERROR(describe_engine());
      TORPOR_RETURN_IF_ERROR(send(orders::Save::Stage::kOpen));
      at_ = At::kOpeningRanks;
      return may_have_ended;
    }
    case At::kOpeningRanks: {
      TORPOR_ASSIGN_OR_RETURN(const bool opened, ranks_have_ended(wait));
      if (!opened) return false;
      TORPOR_RETURN_IF_ERROR(pending_->check_chunk_files(ranks_.size()));
      events_->leave();
      enter("save");
      TORPOR_RETURN_IF_ERROR(precopy());
      at_ = At::kPrecopying;
      return may_have_ended;
    }
    case At::kPrecopying: {
      TORPOR_ASSIGN_OR_RETURN(const bool copied, ranks_have_ended(wait));
      if (!copied) return false;
      events_->leave(copied_);
      at_ = At::kReady;
      return true;
    }
    case At::kTaken: {
      TORPOR_ASSIGN_OR_RETURN(const bool written, ranks_have_ended(wait));
      if (!written) return false;
      TORPOR_ASSIGN_OR_RETURN(const bool state_written, own_work_ended(wait));
      if (!state_written) return false;
      at_ = At::kCommitting;
      events_->leave(copied_);
      enter("verify");
      TORPOR_RETURN_IF_ERROR(work_.begin([this] { return commit(); }));
      return true;
    }
    case At::kCommitting: {
      TORPOR_ASSIGN_OR_RETURN(const bool committed, own_work_ended(wait));
      if (!committed) return false;
      at_ = At::kEnded;
      events_->leave();
      report_.phases = events_->take_phases();
      events_->end(Edge::kEnd, {});
      pending_.reset();  // releases the lock of its directory
      (void)try_catch([&]() -> Status {
        const auto stopped = engine_.ranks.undo(orders::PollSave{.stop = true});
        if (!stopped) log().warn("{}", stopped.error());
        return ok();
      });
      return true;
    }
    case At::kReady:
    case At::kEnded: return false;
  }
  return false;
}

Result<std::vector<orders::Save::Reply>> BackgroundCheckpoint::send(orders::Save::Stage stage) {
  save_.stage = stage;
  return engine_.ranks.call(save_);
}

Result<bool> BackgroundCheckpoint::own_work_ended(bool wait) {
  if (!wait && !work_.ended()) return false;
  TORPOR_RETURN_IF_ERROR(work_.wait());
  return true;
}

Result<bool> BackgroundCheckpoint::ranks_have_ended(bool wait) {
  TORPOR_ASSIGN_OR_RETURN(ranks_, engine_.ranks.call(orders::PollSave{.wait = wait}));
  return std::all_of(ranks_.begin(), ranks_.end(), [](const orders::PollSave::Reply& rank) { return rank.ended; });
}

// Ask the ranks and the engine for all that would end this checkpoint if it changed.
Status BackgroundCheckpoint::describe_engine() {
  TORPOR_ASSIGN_OR_RETURN(described_, engine_.ranks.call(orders::Describe{}));
  engine_.state.set_tags(described_);
  TORPOR_RETURN_IF_ERROR(all_have_content(described_));
  TORPOR_ASSIGN_OR_RETURN(const std::vector<std::string> tags, select_tags({}, described_));
  TORPOR_RETURN_IF_ERROR(has_kv(tags, described_));
  choose_tags(tags);
  TORPOR_ASSIGN_OR_RETURN(captured_.fingerprint, fingerprint_of(engine_, described_, WeightsDigest::kNone));
  return ok();
}

// Put the tag of the KV cache first: the ranks identify contents by position.
void BackgroundCheckpoint::choose_tags(const std::vector<std::string>& tags) {
  for (const std::string& tag : tags) {
    if (!is_scratch(tag)) (tag == kWeightsTag ? save_.carried : save_.tags).push_back(tag);
  }
  std::stable_partition(save_.tags.begin(), save_.tags.end(),
                        [](const std::string& tag) { return tag == kKvCacheTag; });
  save_.directory = pending_->staging_path();
  save_.writing = pending_->writing();
  save_.as_proven = !engine_.options.always_read_weights;
  save_.progress = options_.progress;
}

void BackgroundCheckpoint::choose_blocks(KvContents& contents) {
  save_.blocks = std::move(contents.blocks);
  save_.versions = std::move(contents.versions);
  save_.steps = contents.steps;
}

// Called between two steps with none in flight: blocks that have a version are complete.
Status BackgroundCheckpoint::precopy() {
  const std::chrono::nanoseconds began = engine_.clock.now();
  const std::optional<uint64_t> budget = engine_.options.kv_budget_bytes;
  const Status asked = try_catch([&]() -> Status {
    TORPOR_RETURN_IF_ERROR(engine_.hooks.quiesce(std::nullopt));
    if (budget) {
      TORPOR_ASSIGN_OR_RETURN(const CapturedState state, engine_.hooks.capture());
      TORPOR_RETURN_IF_ERROR(state.validate());
      name_blocks(save_, state, select_live_blocks(state.kv, block_bytes(described_).most, budget).kept);
    } else {
      TORPOR_ASSIGN_OR_RETURN(KvContents contents, engine_.hooks.kv_contents());
      choose_blocks(contents);
    }
    TORPOR_ASSIGN_OR_RETURN(const std::vector<orders::Save::Reply> copied, send(orders::Save::Stage::kPrecopy));
    copied_ = total_bytes(copied);
    return ok();
  });
  if (const Status resumed = engine_.hooks.resume(); !resumed) {
    engine_.state.mark_unrecoverable(resumed.error());
    return resumed.error();
  }
  precopy_seconds_ = seconds_between(began, engine_.clock.now());
  return asked;
}

Status BackgroundCheckpoint::take(const Value& outputs) {
  captured_.outputs = outputs;
  captured_.metadata = options_.metadata;
  const std::chrono::nanoseconds began = engine_.clock.now();
  SleepOperation sleep(context_, "checkpoint", options_, events_->number());
  Status copied = try_catch([&] { return stop_and_copy(sleep); });
  if (copied) {
    sleep.operation().commit();
    copied = engine_.hooks.resume();
    if (!copied) engine_.state.mark_unrecoverable(copied.error());
  }
  if (!copied) {
    published_why_ = true;
    return fail(sleep.undone(std::move(copied).error()));
  }
  engine_.state.enter(EngineState::At::kAwake);
  sleep.operation().fill(sleep.report());
  report_ = std::move(sleep.report());
  report_.seconds += precopy_seconds_;
  (void)try_catch([&]() -> Status {
    events_->add(std::exchange(report_.phases, {}), began);
    return ok();
  });
  at_ = At::kTaken;
  enter("commit");  // the name that recordings have: it writes the state, and "verify" commits
  Status begun = work_.begin([this] { return write_state(); });
  return begun ? ok() : Status(fail(std::move(begun).error()));
}

// Keep the stop short: the engine was described before it, and slow parts of the state are read after it.
Status BackgroundCheckpoint::stop_and_copy(SleepOperation& sleep) {
  SleepReport& report = sleep.report();
  Operation& operation = sleep.operation();
  report.to = "disk";
  report.preserve_state = true;
  report.changed = true;
  report.fully_awake = true;
  TORPOR_RETURN_IF_ERROR(engine_.can_preserve(EngineParts::kNoCheckpoint));  // requests may have come since
  TORPOR_RETURN_IF_ERROR(sleep.quiesce_engine());
  operation.begin("capture");
  TORPOR_ASSIGN_OR_RETURN(moment_, engine_.hooks.capture_moment());
  if (const std::optional<uint64_t> budget = engine_.options.kv_budget_bytes) {
    TORPOR_RETURN_IF_ERROR(read_moment());
    KvSnapshot& kv = captured_.state.kv;
    const LiveBlocks live = select_live_blocks(kv, block_bytes(described_).most, budget);
    drop_hashes(kv, live.dropped);
    name_blocks(save_, captured_.state, live.kept);
  } else {
    choose_blocks(moment_.kv);
  }
  operation.end("capture");
  TORPOR_RETURN_IF_ERROR(operation.go_on());
  operation.begin("save");
  TORPOR_ASSIGN_OR_RETURN(const std::vector<orders::Save::Reply> saved, send(orders::Save::Stage::kStopAndCopy));
  if (!save_.carried.empty()) add_weights(captured_.fingerprint, saved);
  context_.checkpoints.name_owner(*pending_, captured_.fingerprint);
  report.kept_blocks = static_cast<int64_t>(save_.blocks.size());
  copied_ = total_bytes(saved);
  operation.end("save", copied_);
  return ok();
}

Status BackgroundCheckpoint::read_moment() {
  TORPOR_ASSIGN_OR_RETURN(captured_.state, std::exchange(moment_, {}).read());
  return captured_.state.validate();
}

Status BackgroundCheckpoint::write_state() {
  if (moment_.read) TORPOR_RETURN_IF_ERROR(read_moment());
  return pending_->write_state(captured_);
}

// Commit the checkpoint or nothing. A committed checkpoint that cannot be reported is withdrawn.
Status BackgroundCheckpoint::commit() {
  const Status committed = try_catch([&]() -> Status {
    for (const orders::PollSave::Reply& rank : ranks_) {
      for (const auto& [tag, sums] : rank.saved.saved.tags) report_.checkpoint_parts[tag] += sums.stored_bytes;
      report_.saved_bytes += rank.saved.bytes;
      report_.compacted_bytes += rank.saved.compacted_bytes;
      report_.reused_bytes += rank.saved.reused_bytes;
      pending_->add_rank(rank.saved.saved);
    }
    report_.disk_bytes = report_.saved_bytes + report_.reused_bytes;
    stays_ = true;
    TORPOR_RETURN_IF_ERROR(context_.checkpoints.commit(*pending_, report_));
    report_.metadata = captured_.metadata;
    return ok();
  });
  if (!committed) {
    if (pending_->withdraw()) stays_ = false;
    return committed;
  }
  pending_->retire_older();
  return ok();
}

Result<SleepReport> BackgroundCheckpoint::finish() {
  while (!ended()) TORPOR_RETURN_IF_ERROR(advance(/*wait=*/true));
  if (error_) return std::move(*error_);  // a copy could fail, and would lose what has changed
  return std::move(report_);
}

void BackgroundCheckpoint::cancel() noexcept {
  if (at_ == At::kCommitting) {
    end_or_wait("");
  } else if (at_ != At::kEnded) {
    fail({.code = Code::kAborted, .what = "cancelled"});
  }
}

// The caller of the checkpoint learns of its end by its next call.
void BackgroundCheckpoint::end_or_wait(std::string_view why) noexcept {
  if (ended()) return;
  if (!can_finish()) {
    Error error{.code = Code::kAborted};
    (void)try_catch([&]() -> Status {
      error.next_step = "ask for it again";
      error.what = fmt::format("the checkpoint was given up: {}", why);
      return ok();
    });
    fail(std::move(error));
    return;
  }
  while (!ended()) {
    auto advanced = try_catch([&] { return advance(/*wait=*/true); });
    if (!advanced) fail(std::move(advanced).error());
  }
}

void BackgroundCheckpoint::enter(std::string_view phase) noexcept {
  if (progress_ != nullptr) progress_->begin_phase(number_of(phase, kPhaseNames));
  events_->enter(phase);
}

// End the checkpoint with this error, and leave nothing of it here or on the ranks. It needs no memory. Return the
// error; without its words, if there is no memory for them.
Error BackgroundCheckpoint::fail(Error error) noexcept {
  const Status stopped = try_catch([&]() -> Status {
    TORPOR_RETURN_IF_ERROR(engine_.ranks.undo(orders::PollSave{.stop = true}));
    return ok();
  });
  (void)work_.wait();
  pending_.reset();
  const bool unrecoverable = engine_.state.unrecoverable();
  error.state_changed = stays_ || unrecoverable;
  error_ = std::move(error);
  at_ = At::kEnded;
  events_->end(unrecoverable ? Edge::kLost : Edge::kFailed, published_why_ ? std::string_view() : error_->what);
  (void)try_catch([&]() -> Status {
    if (!stopped) log().warn("{}", stopped.error());
    if (stays_) error_->what += fmt::format("; its checkpoint is {}", report_.checkpoint);
    return ok();
  });
  Error returned{.code = error_->code, .state_changed = error_->state_changed};
  (void)try_catch([&]() -> Status {
    returned = *error_;
    return ok();
  });
  return returned;
}

}  // namespace torpor
