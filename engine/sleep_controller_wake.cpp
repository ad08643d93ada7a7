// SleepController::wake_up() and end_hold().
#include "engine/sleep_controller.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/log.h"
#include "checkpoint/store_names.h"
#include "engine/operation.h"

namespace torpor {

Result<SleepReport> SleepController::wake_up(const WakeOptions& options) {
  const std::unique_lock busy(operation_mutex_, std::try_to_lock);
  if (!busy.owns_lock()) {
    return Error{.code = Code::kUnavailable,
                 .what = fmt::format("the engine is {}", state().engine),
                 .next_step = "wait for that to end"};
  }
  State before;
  {
    const std::lock_guard lock(state_mutex_);
    before = state_;
  }
  if (before == State::kLost) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = "the engine is lost",
                 .next_step = "start a new one and wake it from its last checkpoint"};
  }
  const bool anew = !options.from_checkpoint.empty() || options.answers;
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
  Operation operation("wake", clock_, sink_, [this] { return lost(); });
  set_state(State::kWaking);
  Result<SleepReport> report =
      before == State::kAsleep ? wake_same_process(options, operation) : wake_from_checkpoint(options, operation);
  if (!report) {
    operation.undo();
    if (!lost()) set_state(before);
    Error error = std::move(report).error();
    error.state_changed = lost();
    return error.within("wake");
  }
  operation.keep();
  operation.fill(*report);
  return report;
}

Result<SleepReport> SleepController::wake_same_process(const WakeOptions& options, Operation& operation) {
  SleepReport report;
  std::vector<std::string> tags = sleeping_tags_;
  for (const std::string& tag : options.tags) {
    if (has_tag(tags, tag) || tag == "scheduling") continue;
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("the tag \"{}\" is not asleep", tag),
                 .next_step = fmt::format("use some of: {}", fmt::join(tags, ", "))};
  }
  if (!options.tags.empty()) std::erase_if(tags, [&](const std::string& tag) { return !has_tag(options.tags, tag); });
  const bool last = tags.size() == sleeping_tags_.size();

  if (!tags.empty()) {
    operation.begin("attach");
    Result<std::vector<RankReply>> attached = ranks_.call("attach", {.tags = tags});
    operation.undo_with([this, tags] { undo_restore(tags); });
    if (!attached) return attached.error();
    operation.end("attach");
    operation.begin("restore");
    TORPOR_ASSIGN(const std::vector<RankReply> restored, ranks_.call("restore", {.tags = tags}));
    report.restored_bytes = total_bytes(restored);
    for (const std::string& tag : restored.front().without_content) {
      if (tag != kKvCacheTag) report.reload.push_back(tag);
    }
    operation.end("restore", report.restored_bytes);
  }
  std::vector<RankReply> finished;
  const auto finish = [&]() -> Status {
    if (tags.empty()) return ok();
    TORPOR_ASSIGN(finished, ranks_.call("finish", {.tags = tags, .keep_backup = !options.weights_changed}));
    remember(finished);
    report.ledgers = ledgers_of(finished);
    return ok();
  };
  if (!last) {
    TORPOR_TRY(finish());
    std::erase_if(sleeping_tags_, [&](const std::string& tag) { return has_tag(tags, tag); });
    report.changed = !tags.empty();
    report.note = fmt::format("still asleep: {}", fmt::join(sleeping_tags_, ", "));
    set_state(State::kAsleep);
    return report;
  }

  operation.begin("reconnect");
  if (derived_released_) {
    operation.undo_with([this] {
      if (const Status released = hooks_.release_derived(); !released) log().error("{}", released.error().to_string());
    });
    TORPOR_TRY(hooks_.rebuild_derived());
  }
  if (preserved_) TORPOR_TRY(hooks_.reconnect(workers_));
  if (options.weights_changed) TORPOR_TRY(hooks_.drop_requests("recompute"));
  TORPOR_TRY(finish());
  // From here on the backups are gone; only the engine's own resume is left.
  operation.keep();
  if (const Status resumed = hooks_.resume(); !resumed) {
    lose(resumed.error());
    return resumed.error();
  }
  operation.end("reconnect");

  TORPOR_ASSIGN(report.requests, hooks_.unfinished_requests());
  std::string slept_to;
  {
    const std::lock_guard lock(state_mutex_);
    slept_to = public_.checkpoint;
    public_.level = -1;
    public_.checkpoint.clear();
  }
  if (!slept_to.empty()) {
    report.checkpoint = slept_to;
    const Status retained = [&]() -> Status {
      TORPOR_ASSIGN(const Checkpoint checkpoint, open_checkpoint(file_system_, slept_to, options_.checkpoints.key));
      TORPOR_ASSIGN(const std::unique_ptr<CheckpointManager> checkpoints, manager(options_.directory));
      return checkpoints->woken_from(checkpoint.manifest().generation);
    }();
    if (!retained) log().warn("older checkpoints were not removed: {}", retained.error().to_string());
  }
  sleeping_tags_.clear();
  workers_.clear();
  derived_released_ = false;
  report.changed = true;
  report.fully_awake = true;
  set_state(State::kAwake);
  return report;
}

// Memory that can be neither mapped nor given back cannot be woken again; its content is safe where it was saved.
void SleepController::undo_restore(const std::vector<std::string>& tags) {
  ranks_.undo("cancel_restore", {.tags = tags});
  const Result<std::vector<RankReply>> described = ranks_.call("describe", {});
  if (!described) return;
  remember(*described);
  for (const auto& [tag, tag_state] : state().tags) {
    if (tag_state != "broken") continue;
    lose({.code = Code::kDevice,
          .what = fmt::format("the tag {} is broken", tag),
          .next_step = "start a new engine and wake it from its last checkpoint",
          .origin = Origin::kDevice});
    return;
  }
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
  const auto restore = [&]() -> Status {
    operation.begin("open");
    std::optional<Checkpoint> checkpoint;  // none: all is computed anew
    EngineCheckpoint state;
    if (!options.from_checkpoint.empty()) {
      TORPOR_ASSIGN(checkpoint, open_checkpoint(file_system_, options.from_checkpoint, options_.checkpoints.key));
      TORPOR_ASSIGN(state, checkpoint->read_state());
      TORPOR_TRY(state.state.validate());
      TORPOR_ASSIGN(const Fingerprint engine, fingerprint());
      TORPOR_TRY(compare_fingerprints(state.fingerprint, engine));
      report.checkpoint = checkpoint->path();
      report.checkpoint_bytes = checkpoint->manifest().total_bytes();
    }
    operation.end("open", report.checkpoint_bytes);

    operation.begin("quiesce");
    TORPOR_TRY(hooks_.quiesce(std::nullopt));
    operation.undo_with([this] {
      if (const Status resumed = hooks_.resume(); !resumed) lose(resumed.error());
    });
    operation.end("quiesce");
    operation.begin("restore");
    // The KV pool of an engine without requests holds nothing that anybody may still read, except cached prefixes.
    TORPOR_TRY(hooks_.drop_requests("abort"));
    if (checkpoint) {
      TORPOR_ASSIGN(
          const std::vector<RankReply> loaded,
          ranks_.call("load_blocks", {.directory = checkpoint->path(), .chunks = checkpoint->manifest().ranks}));
      report.restored_bytes = total_bytes(loaded);
      report.ledgers = ledgers_of(loaded);
      remember(loaded);
    } else {
      TORPOR_ASSIGN(state.state, hooks_.capture());
    }
    operation.end("restore", report.restored_bytes);

    operation.begin("reconnect");
    if (options.answers) {
      bool woken_before = false;
      if (checkpoint) {
        TORPOR_ASSIGN(const std::unique_ptr<Directory> directory,
                      file_system_.open_directory(checkpoint->path(), false));
        woken_before = directory->open_file(kWokenFile).has_value();
      }
      TORPOR_ASSIGN(report.rolled, roll_forward(state.state, *options.answers, woken_before));
    }
    operation.undo_with([this] {
      if (const Status forgotten = hooks_.forget_restored(); !forgotten) lose(forgotten.error());
    });
    TORPOR_ASSIGN(report.failed_requests, hooks_.restore(state));
    report.requests = static_cast<int64_t>(state.state.scheduler.requests.size() - report.failed_requests.size());
    report.kept_blocks = static_cast<int64_t>(state.state.kv.blocks.size());
    report.outputs = state.outputs;
    operation.end("reconnect");
    if (!checkpoint) return ok();
    const Status retained = [&]() -> Status {
      const size_t name_at = checkpoint->path().rfind('/');
      TORPOR_ASSIGN(const std::unique_ptr<CheckpointManager> checkpoints,
                    manager(checkpoint->path().substr(0, name_at)));
      return checkpoints->woken_from(checkpoint->manifest().generation);
    }();
    if (!retained) log().warn("older checkpoints were not removed: {}", retained.error().to_string());
    return ok();
  };
  if (Status restored = restore(); !restored) {
    if (!options.discard_on_restore_error) return restored.error();
    operation.undo();
    if (lost()) return restored.error();
    log().error("waking without the state: {}", restored.error().to_string());
    report.note = fmt::format("the state was discarded: {}", restored.error().to_string());
    set_state(State::kAwake);
    return report;
  }
  report.changed = true;
  if (options.hold) {
    held_ = true;
    set_state(State::kWaking);
    return report;
  }
  TORPOR_TRY(hooks_.resume());
  set_state(State::kAwake);
  return report;
}

// The restored requests are in an engine that stands still: if they can be neither dropped nor run, nothing can be said
// of it.
Status SleepController::end_hold(bool keep) {
  const std::lock_guard busy(operation_mutex_);
  if (!held_)
    return Error{.code = Code::kFailedPrecondition, .what = "nothing is held", .next_step = "wake with hold first"};
  held_ = false;
  Status ended = keep ? ok() : hooks_.forget_restored();
  if (ended) ended = hooks_.resume();
  if (!ended) {
    lose(ended.error());
    return ended;
  }
  set_state(State::kAwake);
  return ok();
}

}  // namespace torpor
