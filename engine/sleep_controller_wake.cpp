// SPDX-License-Identifier: Apache-2.0
// SleepController::wake_up() and end_hold().
#include "engine/sleep_controller.h"

#include <algorithm>

#include <fmt/core.h>

#include "base/log.h"
#include "base/text.h"
#include "checkpoint/store_names.h"
#include "engine/fit_blocks.h"
#include "engine/sleep_in_progress.h"

namespace torpor {

Result<SleepReport> SleepController::wake_up(const WakeOptions& options) {
  return catching([&] { return options.swap_in_from.empty() ? wake_now(options) : take_now(options); });
}

Result<SleepReport> SleepController::wake_now(const WakeOptions& options, const Exchange* exchange) {
  if (!operation_mutex_.try_lock()) return busy();
  const MutexLock in_progress(operation_mutex_, std::adopt_lock);
  State before;
  {
    const MutexLock lock(state_mutex_);
    before = state_;
  }
  if (before == State::kLost) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = "the engine is unrecoverable",
                 .next_step = "start a new one and wake it from its last checkpoint"};
  }
  if (held_sleep_ != nullptr)
    return Error{.code = Code::kFailedPrecondition,
                 .what = "a sleep waits for the word of its front end",
                 .next_step = "end it first"};
  const bool anew = !options.from_checkpoint.empty() || options.catch_up;
  if (before == State::kAwake && !anew) {
    log().warn("wake_up: the engine is already awake");
    SleepReport report;
    report.note = "already awake";
    report.fully_awake = true;
    return report;
  }
  if (before == State::kAsleep && anew) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = "this engine is asleep with a state of its own",
                 .next_step = "wake it without from_checkpoint, or wake the checkpoint in a new engine"};
  }
  if (held_) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = "a restored checkpoint waits for its front end",
                 .next_step = "end the wake first"};
  }
  TORPOR_TRY(wait_for_late());
  settle_behind("a wake was asked for");
  Operation operation("wake", clock_, port_, *this, options.progress);
  set_state(State::kWaking);
  Result<SleepReport> report = catching([&]() TORPOR_REQUIRES(operation_mutex_) {
    return before == State::kAsleep ? wake_same_process(options, operation, exchange)
                                    : wake_from_checkpoint(options, operation);
  });
  if (report) {
    operation.fill(*report);
    return report;
  }
  Error error = std::move(report).error();
  operation.failed(error);
  operation.undo();
  if (!lost()) set_state(before);
  const std::string_view irreversible = operation.irreversible();
  error.state_changed = lost() || !irreversible.empty();
  (void)catching([&]() -> Status {
    std::string what = fmt::format("wake: {}", error.what);
    if (!irreversible.empty()) what += fmt::format("; {}", irreversible);
    error.what = std::move(what);
    return ok();
  });
  return error;
}

Result<SleepReport> SleepController::wake_same_process(const WakeOptions& options, Operation& operation,
                                                       const Exchange* exchange) {
  const std::string room = exchange == nullptr ? "" : exchange->room;
  SleepReport report;
  std::vector<std::string> tags = sleeping_tags_;
  for (const std::string& tag : options.tags) {
    if (has_tag(tags, tag) || tag == "scheduling") continue;
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("the tag \"{}\" is not asleep", tag),
                 .next_step = fmt::format("use some of: {}", joined(tags, ", "))};
  }
  const bool names_memory =
      std::any_of(tags.begin(), tags.end(), [&](const auto& tag) { return has_tag(options.tags, tag); });
  if (!options.tags.empty()) {
    std::erase_if(
        tags, [&](const std::string& tag) { return !has_tag(options.tags, tag) && (may_wait(tag) || !names_memory); });
  }
  std::vector<std::string> still_asleep = sleeping_tags_;
  std::erase_if(still_asleep, [&](const std::string& tag) { return has_tag(tags, tag); });

  size_t ranks = 0;
  std::vector<int32_t> late;
  if (options.early && preserved_ && still_asleep.empty() && has_tag(tags, kKvCacheTag) &&
      options.old_kv == OldKv::kUnsaid)
    late = late_blocks_;
  if (!tags.empty()) {
    operation.begin("restore");
    operation.undo_with([this, tags] { return undo_restore(tags); });
    TORPOR_ASSIGN(const std::vector<orders::Restore::Reply> restored,
                  ranks_.call(orders::Restore{.tags = tags, .progress = options.progress, .late = late, .room = room}));
    report.restored_bytes = total_bytes(restored);
    ranks = restored.size();
    for (const orders::Restore::Reply& reply : restored) {
      report.late_bytes += reply.late_bytes;
      for (const std::string& tag : reply.without_content) {
        if (tag != kKvCacheTag && !has_tag(report.reload, tag)) report.reload.push_back(tag);
      }
    }
    operation.end("restore", report.restored_bytes);
  }
  const bool reload_first = !report.reload.empty();
  const bool said = options.old_kv != OldKv::kUnsaid;
  const bool drops_kv = options.old_kv == OldKv::kRecompute || options.old_kv == OldKv::kAbort;
  if (!still_asleep.empty()) {
    report.changed = !tags.empty();
    report.note = fmt::format("still asleep: {}", joined(still_asleep, ", "));
    if (reload_first) report.note += "; " + warning_of(report.reload, WakeEnd::kStillAsleep);
    if (!tags.empty()) TORPOR_TRY(finish(tags, !drops_kv, report.ledgers));
    operation.keep();
    std::erase_if(empty_, [&](const std::string& tag) { return has_tag(tags, tag); });
    sleeping_tags_ = std::move(still_asleep);
    set_state(State::kAsleep);
    return report;
  }

  TORPOR_ASSIGN(const bool written, look_at_weights(options, report));
  if (!late.empty() && (written || !report.reload.empty())) {
    TORPOR_TRY(all_arrived(ranks, operation));
    report.restored_bytes += std::exchange(report.late_bytes, 0);
    late.clear();
  }
  TORPOR_ASSIGN(const bool waits, waits_for(report.reload, options));
  if (waits && (reload_first || !said) && exchange == nullptr) {
    report.changed = !tags.empty();
    report.note = warning_of(report.reload, WakeEnd::kWaits);
    if (!tags.empty()) TORPOR_TRY(finish(tags, !drops_kv, report.ledgers));
    operation.keep();
    empty_.clear();
    sleeping_tags_.clear();
    set_state(State::kAsleep);
    return report;
  }
  TORPOR_TRY(operation.go_on());
  TORPOR_ASSIGN(report.requests, hooks_.unfinished_requests());
  const bool kv_of_old_weights = written && (preserved_ || !derived_released_);
  if (kv_of_old_weights && !said && report.requests > 0) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("the weights were written meanwhile, and {} requests have KV of the old ones",
                                     report.requests),
                 .next_step = "say what becomes of it: kv=\"recompute\", \"keep\" or \"abort\""};
  }
  TORPOR_TRY(exchanged(exchange, report));
  operation.begin("reconnect");
  if (derived_released_) {
    operation.undo_with([this]() -> Status {
      // It takes some memory until the next wake makes it again; the engine can be woken all the same.
      if (const Status released = hooks_.release_derived(); !released) log().error("{}", released.error().to_string());
      return ok();
    });
    TORPOR_TRY(hooks_.rebuild_derived());
  }
  if (preserved_) TORPOR_TRY(hooks_.reconnect(workers_));
  if (drops_kv) {
    TORPOR_TRY(drop_old_kv(options.old_kv == OldKv::kAbort, report.requests, operation));
  } else if (kv_of_old_weights || (preserved_ && !report.reload.empty())) {
    TORPOR_TRY(hooks_.retire_prefix());
    report.note = "the weights were written meanwhile: cached prefixes of the old ones are found no more";
    if (report.requests > 0) report.note += ", running requests keep their KV";
  }
  if (!report.reload.empty()) report.note = warning_of(report.reload, WakeEnd::kRuns);
  if (!late.empty()) TORPOR_TRY(hold_late(late, ranks, operation));
  TORPOR_TRY(committed(exchange));
  if (!tags.empty()) TORPOR_TRY(finish(tags, !drops_kv, report.ledgers));
  report.late_blocks = static_cast<int64_t>(late.size());
  // From here on the backups are gone; only the engine's own resume can still fail.
  operation.keep();
  if (const Status resumed = hooks_.resume(); !resumed) {
    lose(resumed.error());
    return resumed.error();
  }
  operation.end("reconnect");
  sleeping_tags_.clear();
  workers_.clear();
  late_blocks_.clear();
  weights_.clear();
  empty_.clear();
  if (written) is_told_ = said;
  derived_released_ = false;
  report.changed = true;
  report.fully_awake = true;
  {
    const MutexLock lock(state_mutex_);
    set_state_locked(State::kAwake);
    report.checkpoint = std::move(public_.checkpoint);
    report.metadata = std::exchange(metadata_, {});
    public_.level = -1;
    public_.checkpoint.clear();
  }
  if (restored_from_) mark_woken(*restored_from_);
  restored_from_.reset();
  if (late_ && late_->left.empty()) (void)catching([&]() TORPOR_REQUIRES(operation_mutex_) { return wait_for_late(); });
  return report;
}

Status SleepController::drop_old_kv(bool aborts, int64_t requests, Operation& operation) {
  if (requests > 0)
    operation.irreversible(aborts ? "its requests may have ended" : "its requests may be computed again");
  TORPOR_TRY(hooks_.drop_requests(aborts ? "abort" : "recompute"));
  if (requests > 0) operation.irreversible(aborts ? "its requests have ended" : "its requests are computed again");
  return ok();
}

// The last order of a wake. A rank that has carried it out has no way back: then all must, or the engine is
// unrecoverable.
Status SleepController::finish(const std::vector<std::string>& tags, bool keep_backup,
                               std::vector<RankLedger>& ledgers) {
  const orders::Finish order{.tags = tags, .keep_backup = keep_backup};
  const auto attempt = [&]() -> Status {
    TORPOR_ASSIGN(const std::vector<orders::Finish::Reply> finished, ranks_.call(order));
    std::vector<RankLedger> after = ledgers_of(finished);
    remember(finished);
    ledgers = std::move(after);
    return ok();
  };
  const Status first = catching(attempt);
  if (first) return finished(tags), first;
  const Result<bool> none_finished = catching([&]() -> Result<bool> {
    TORPOR_ASSIGN(const Described described, ranks_.call(orders::Describe{}));
    return std::none_of(described.begin(), described.end(), [&](const orders::Describe::Reply& reply) {
      return std::any_of(tags.begin(), tags.end(), [&](const std::string& tag) {
        const auto entry = reply.ledger.tags.find(tag);
        return entry != reply.ledger.tags.end() && entry->second.state == "attached";
      });
    });
  });
  if (none_finished && *none_finished) return first;
  const Status second = catching(attempt);
  if (!second) lose(second.error());
  if (second) finished(tags);
  return second;
}

void SleepController::finished(const std::vector<std::string>& tags) noexcept {
  if (has_tag(tags, kKvCacheTag) && !late_) release_host_slots();
}

// Where it fails, the next checkpoint reads all blocks once.
void SleepController::tell_contents(const Checkpoint& checkpoint) noexcept {
  const Status told = catching([&]() -> Status {
    TORPOR_ASSIGN(KvContents contents, hooks_.kv_contents());
    TORPOR_TRY(ranks_.call(orders::TellContents{.id = checkpoint.manifest().id,
                                                .blocks = std::move(contents.blocks),
                                                .stamps = std::move(contents.stamps),
                                                .steps = contents.steps}));
    return ok();
  });
  if (told) return;
  (void)catching([&]() -> Status {
    log().warn("the next checkpoint will read all of the KV: {}", told.error().to_string());
    return ok();
  });
}

// Memory that can be neither mapped nor given back cannot be woken again; its content is safe where it was saved.
Status SleepController::undo_restore(const std::vector<std::string>& tags) {
  // What stays on the way is taken up by the next wake.
  if (const auto cancelled = ranks_.undo(orders::CancelRestore{.tags = tags}); !cancelled)
    log().error("undoing a wake: {}", cancelled.error().to_string());
  const Result<Described> described = ranks_.undo(orders::Describe{});
  if (!described) return ok();
  remember(*described);
  for (const orders::Describe::Reply& reply : *described) {
    for (const auto& [tag, entry] : reply.ledger.tags) {
      if (entry.state != "broken") continue;
      return Error{.code = Code::kDevice,
                   .what = fmt::format("the tag {} is broken", tag),
                   .next_step = "start a new engine and wake it from its last checkpoint",
                   .origin = Origin::kDevice};
    }
  }
  return ok();
}

Result<std::string> SleepController::checkpoint_to_wake() {
  return catching([&]() -> Result<std::string> {
    if (!operation_mutex_.try_lock()) return busy();
    const MutexLock in_progress(operation_mutex_, std::adopt_lock);
    if (options_.directory.empty() || state().engine != "awake") return std::string();
    TORPOR_ASSIGN(const int64_t unfinished, hooks_.unfinished_requests());
    TORPOR_ASSIGN(const KvContents contents, hooks_.kv_contents());
    if (unfinished > 0 || contents.steps != 1 || took_checkpoint_) return std::string();
    const Result<Checkpoint> latest = open_checkpoint(file_system_, options_.directory, options_.checkpoints.key);
    if (!latest && latest.error().code == Code::kNotFound) return std::string();
    return options_.directory;  // what is wrong with it, the wake says
  });
}

Result<SleepReport> SleepController::wake_from_checkpoint(const WakeOptions& options, Operation& operation) {
  SleepReport report;
  report.fully_awake = true;
  TORPOR_ASSIGN(const int64_t unfinished, hooks_.unfinished_requests());
  if (unfinished > 0) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("this engine has {} requests of its own", unfinished),
                 .next_step = "wake the checkpoint in an engine without requests"};
  }
  restored_from_.reset();
  if (Status restored =
          catching([&]() TORPOR_REQUIRES(operation_mutex_) { return restore(options, operation, report); });
      !restored) {
    if (!options.discard_on_restore_error || operation.cancelled()) return restored.error();
    operation.undo();
    if (lost()) return restored.error();
    log().error("waking without the state: {}", restored.error().to_string());
    took_checkpoint_ = true;
    SleepReport discarded{.fully_awake = true, .checkpoint = std::move(report.checkpoint)};
    discarded.note = fmt::format("the state was discarded: {}", restored.error().to_string());
    set_state(State::kAwake);
    return discarded;
  }
  report.changed = true;
  took_checkpoint_ = true;
  if (options.hold) {
    operation.keep();
    held_ = true;
    return report;
  }
  TORPOR_TRY(hooks_.resume());
  operation.keep();
  set_state(State::kAwake);
  if (restored_from_) mark_woken(*restored_from_);
  restored_from_.reset();
  return report;
}

Status SleepController::catch_up(const WakeOptions& options, const Checkpoint& checkpoint, SchedulerCheckpoint& state) {
  TORPOR_ASSIGN(const std::unique_ptr<Directory> directory, file_system_.open_directory(checkpoint.path(), false));
  const Result<std::unique_ptr<File>> mark = directory->open_file(kWokenFile);
  if (!mark && mark.error().code != Code::kNotFound) return mark.error();
  return options.catch_up(state, mark.has_value());
}

Status SleepController::restore(const WakeOptions& options, Operation& operation, SleepReport& report) {
  // What such an engine was given could not be preserved, nor can it go on with what another one was given.
  TORPOR_ASSIGN(const std::vector<std::string> unsupported, hooks_.unsupported());
  if (!unsupported.empty()) {
    return Error{.code = Code::kUnsupported,
                 .what = fmt::format("this engine cannot go on with saved requests yet: {}", joined(unsupported, "; ")),
                 .next_step = "wake them in an engine without these features"};
  }
  operation.begin("open");
  std::optional<Checkpoint> checkpoint;  // none: all is computed anew
  EngineCheckpoint state;
  if (!options.from_checkpoint.empty()) {
    TORPOR_ASSIGN(checkpoint, open_checkpoint(file_system_, options.from_checkpoint, options_.checkpoints.key));
    report.checkpoint = checkpoint->path();
    TORPOR_ASSIGN(state, checkpoint->read_state());
    TORPOR_TRY(state.state.validate());
    TORPOR_ASSIGN(const Described described, ranks_.call(orders::Describe{}));
    TORPOR_ASSIGN(const Fingerprint engine, fingerprint_of(described, WeightsDigest::kReadOrProven));
    TORPOR_TRY(check_fits(file_system_, *checkpoint, engine, options.from_checkpoint, options_.checkpoints.key.get()));
    report.checkpoint_bytes = checkpoint->manifest().total_bytes();
    report.unread_bytes = checkpoint->manifest().stored_bytes_but_of(kKvCacheTag);
    // First: blocks of requests that have ended since need no room.
    if (options.catch_up) TORPOR_TRY(catch_up(options, *checkpoint, state.state));
    TORPOR_ASSIGN(FittedBlocks fitted, fit_blocks(state.state.kv, described));
    if (fitted.dropped > 0) log().warn("wake: {}", fitted.note);
    report.dropped_blocks = fitted.dropped;
    report.note = std::move(fitted.note);
  }
  operation.end("open", report.checkpoint_bytes);

  operation.begin("quiesce");
  operation.undo_with([this] { return hooks_.resume(); });
  TORPOR_TRY(hooks_.quiesce(std::nullopt));
  operation.end("quiesce");
  operation.begin("restore");
  // The KV pool of an engine without requests holds nothing that anybody may still read, except cached prefixes.
  TORPOR_TRY(hooks_.drop_requests("abort"));
  size_t ranks = 0;
  std::vector<int32_t> late;
  if (checkpoint && options.early && !options.hold && !options.catch_up) {
    late = late_blocks_of(state.state, blocks_by_need(state.state), hooks_.holds_back());
    operation.undo_with([this] { return forget_late(); });
  }
  if (checkpoint) {
    TORPOR_ASSIGN(const std::vector<orders::LoadBlocks::Reply> loaded,
                  ranks_.call(orders::LoadBlocks{.directory = checkpoint->path(),
                                                 .generation = checkpoint->manifest().generation,
                                                 .id = checkpoint->manifest().id,
                                                 .progress = options.progress,
                                                 .numbers = state.state.kv.block_numbers,
                                                 .late = late}));
    for (const orders::LoadBlocks::Reply& reply : loaded) report.late_bytes += reply.late_bytes;
    ranks = loaded.size();
    report.restored_bytes = total_bytes(loaded);
    report.ledgers = ledgers_of(loaded);
    remember(loaded);
  } else {
    TORPOR_ASSIGN(state.state, hooks_.capture());
    if (options.catch_up) TORPOR_TRY(options.catch_up(state.state, /*woken_before=*/false));
  }
  operation.end("restore", report.restored_bytes);

  TORPOR_TRY(operation.go_on());
  operation.begin("reconnect");
  operation.undo_with([this] { return hooks_.forget_restored(); });
  TORPOR_ASSIGN(report.failed_requests, hooks_.restore(state));
  if (checkpoint && options_.checkpoints.incremental) tell_contents(*checkpoint);
  if (!late.empty()) TORPOR_TRY(hold_late(late, ranks, operation));
  report.late_blocks = static_cast<int64_t>(late.size());
  report.requests = static_cast<int64_t>(state.state.scheduler.requests.size() - report.failed_requests.size());
  report.kept_blocks = static_cast<int64_t>(state.state.kv.blocks.size());
  report.outputs = state.outputs;
  report.metadata = state.metadata;
  operation.end("reconnect");
  if (checkpoint) {
    restored_from_ = place_of(checkpoint->path());
    owner_ = checkpoint->manifest().owner;
  }
  return ok();
}

// The restored requests are in an engine that stands still: if they can be neither dropped nor run, nothing can be said
// of it.
Status SleepController::end_hold(bool keep) {
  return catching([&] { return end_hold_now(keep); });
}

Status SleepController::end_hold_now(bool keep) {
  const MutexLock in_progress(operation_mutex_);
  if (!held_)
    return Error{.code = Code::kFailedPrecondition, .what = "nothing is held", .next_step = "wake with hold first"};
  held_ = false;
  took_checkpoint_ = keep;
  const std::optional<RestoredFrom> from = std::move(restored_from_);
  restored_from_.reset();
  Status ended = keep ? ok() : hooks_.forget_restored();
  if (ended) ended = hooks_.resume();
  if (!ended) {
    lose(ended.error());
    Error error = std::move(ended).error();
    error.state_changed = true;
    return error;
  }
  set_state(State::kAwake);
  if (keep && from) mark_woken(*from);
  return ok();
}

}  // namespace torpor
