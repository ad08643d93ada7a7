// SPDX-License-Identifier: Apache-2.0
#include "engine/wake_operation.h"

#include <algorithm>

#include <fmt/core.h>

#include "base/log.h"
#include "base/text.h"
#include "checkpoint/store_names.h"
#include "engine/engine_fingerprint.h"
#include "engine/fit_blocks.h"

namespace torpor {

WakeOperation::WakeOperation(OperationContext& context, const WakeOptions& options, const SwapIn* swap)
    : context_(context),
      engine_(context.engine),
      options_(options),
      swap_(swap),
      before_(engine_.state.at()),
      operation_("wake", engine_.clock, engine_.port, engine_.state, options.progress) {
  engine_.state.enter(EngineState::At::kWaking);
}

Result<SleepReport> WakeOperation::run() {
  Result<SleepReport> report =
      try_catch([&] { return before_ == EngineState::At::kAsleep ? wake_this_process() : wake_from_checkpoint(); });
  if (report) {
    operation_.fill(*report);
    return report;
  }
  Error error = std::move(report).error();
  operation_.failed(error);
  operation_.undo();
  engine_.state.enter(before_);
  const std::string_view irreversible = operation_.irreversible();
  error.state_changed = engine_.state.unrecoverable() || !irreversible.empty();
  (void)try_catch([&]() -> Status {
    std::string what = fmt::format("wake: {}", error.what);
    if (!irreversible.empty()) what += fmt::format("; {}", irreversible);
    error.what = std::move(what);
    return ok();
  });
  return error;
}

// --- this process ---

Result<SleepReport> WakeOperation::wake_this_process() {
  const SleepInForce& asleep = context_.asleep;
  TORPOR_ASSIGN_OR_RETURN(const std::vector<std::string> tags, tags_that_wake());
  std::vector<std::string> still_asleep = asleep.tags;
  std::erase_if(still_asleep, [&](const std::string& tag) { return has_tag(tags, tag); });
  std::vector<int32_t> deferred;
  if (options_.early && asleep.preserved && still_asleep.empty() && has_tag(tags, kKvCacheTag) && !kv_is_said())
    deferred = asleep.deferrable_blocks;

  if (!tags.empty()) TORPOR_RETURN_IF_ERROR(restore_memory(tags, deferred));
  const bool reload_first = !report_.reload.empty();
  if (!still_asleep.empty()) return end_early(tags, std::move(still_asleep));

  TORPOR_ASSIGN_OR_RETURN(const bool written, has_other_weights());
  if (!deferred.empty() && (written || !report_.reload.empty())) {
    TORPOR_RETURN_IF_ERROR(context_.deferred.wait_before_wake(ranks_, operation_));
    report_.restored_bytes += std::exchange(report_.deferred_bytes, 0);
    deferred.clear();
  }
  TORPOR_ASSIGN_OR_RETURN(const bool waits, waits_for_weights());
  if (waits && (reload_first || !kv_is_said()) && swap_ == nullptr) return end_early(tags, {});

  TORPOR_RETURN_IF_ERROR(operation_.go_on());
  TORPOR_ASSIGN_OR_RETURN(report_.requests, engine_.hooks.unfinished_requests());
  const bool kv_of_old_weights = written && (asleep.preserved || !asleep.derived_released);
  if (kv_of_old_weights && !kv_is_said() && report_.requests > 0) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("the weights were written meanwhile, and {} requests have KV of the old ones",
                                     report_.requests),
                 .next_step = "say what becomes of it: kv=\"recompute\", \"keep\" or \"abort\""};
  }
  if (swap_ != nullptr) {
    if (!report_.reload.empty())
      return Error{.code = Code::kFailedPrecondition,
                   .what = "the engine that is to come has no weights",
                   .next_step = "wake it without the other"};
    TORPOR_RETURN_IF_ERROR(swap_->wait_until_asleep());
  }
  operation_.begin("reconnect");
  TORPOR_RETURN_IF_ERROR(reconnect(kv_of_old_weights));
  if (!deferred.empty()) TORPOR_RETURN_IF_ERROR(context_.deferred.hold(deferred, ranks_, operation_));
  if (swap_ != nullptr && swap_->commit) TORPOR_RETURN_IF_ERROR(swap_->commit());
  if (!tags.empty()) TORPOR_RETURN_IF_ERROR(finish(tags));
  report_.deferred_blocks = static_cast<int64_t>(deferred.size());
  // The backups are dropped from here on; only the engine's own resume can still fail.
  operation_.commit();
  if (Status resumed = engine_.hooks.resume(); !resumed) {
    engine_.state.mark_unrecoverable(resumed.error());
    return std::move(resumed).error();
  }
  operation_.end("reconnect");
  let_run(written);
  return std::move(report_);
}

// Return the sleeping tags that this call wakes. It may name tags that are awake: trainers repeat a wake, and vLLM's
// own does nothing then.
Result<std::vector<std::string>> WakeOperation::tags_that_wake() const {
  std::vector<std::string> tags = context_.asleep.tags;
  const std::map<std::string, std::string> known = engine_.state.view().tags;
  for (const std::string& tag : options_.tags) {
    if (known.contains(tag) || tag == "scheduling") continue;
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("there is no tag \"{}\"", tag),
                 .next_step = fmt::format("use some of: {}", joined(tags, ", "))};
  }
  const bool names_memory =
      std::any_of(tags.begin(), tags.end(), [&](const auto& tag) { return has_tag(options_.tags, tag); });
  if (!options_.tags.empty()) {
    std::erase_if(
        tags, [&](const std::string& tag) { return !has_tag(options_.tags, tag) && (may_wait(tag) || !names_memory); });
  }
  return tags;
}

Status WakeOperation::restore_memory(const std::vector<std::string>& tags, const std::vector<int32_t>& deferred) {
  operation_.begin("restore");
  operation_.undo_with([this, tags] { return undo_restore(tags); });
  TORPOR_ASSIGN_OR_RETURN(const std::vector<orders::Restore::Reply> restored,
                          engine_.ranks.call(orders::Restore{.tags = tags,
                                                             .progress = options_.progress,
                                                             .deferred = deferred,
                                                             .channel = swap_ == nullptr ? "" : swap_->channel}));
  report_.restored_bytes = total_bytes(restored);
  ranks_ = restored.size();
  for (const orders::Restore::Reply& reply : restored) {
    report_.deferred_bytes += reply.deferred_bytes;
    for (const std::string& tag : reply.without_content) {
      if (tag != kKvCacheTag && !has_tag(report_.reload, tag)) report_.reload.push_back(tag);
    }
  }
  operation_.end("restore", report_.restored_bytes);
  return ok();
}

// If memory can be neither mapped nor given back, the tag cannot be woken again; its content is safe in its backup.
Status WakeOperation::undo_restore(const std::vector<std::string>& tags) {
  // Memory that stays mapped halfway is used by the next wake.
  if (const auto cancelled = engine_.ranks.undo(orders::Undo{.what = orders::Undo::What::kRestore, .tags = tags});
      !cancelled)
    log().error("undoing a wake: {}", cancelled.error());
  const Result<Described> described = engine_.ranks.undo(orders::Describe{});
  if (!described) return ok();
  engine_.state.set_tags(*described);
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

// Leave the engine asleep: the requested tags are awake, but others are not, or the weights must be loaded first.
Result<SleepReport> WakeOperation::end_early(const std::vector<std::string>& tags,
                                             std::vector<std::string> still_asleep) {
  report_.changed = !tags.empty();
  if (still_asleep.empty()) {
    report_.note = warning_of(End::kWaits);
  } else {
    report_.note = fmt::format("still asleep: {}", joined(still_asleep, ", "));
    if (!report_.reload.empty()) report_.note += "; " + warning_of(End::kStillAsleep);
  }
  if (!tags.empty()) TORPOR_RETURN_IF_ERROR(finish(tags));
  operation_.commit();
  std::erase_if(context_.asleep.without_content, [&](const std::string& tag) { return has_tag(tags, tag); });
  if (still_asleep.empty()) context_.asleep.without_content.clear();
  context_.asleep.tags = std::move(still_asleep);
  engine_.state.enter(EngineState::At::kAsleep);
  return std::move(report_);
}

Status WakeOperation::reconnect(bool kv_of_old_weights) {
  const SleepInForce& asleep = context_.asleep;
  if (asleep.derived_released) {
    operation_.undo_with([this]() -> Status {
      // Until the next wake makes it again it takes some memory; the engine can be woken all the same.
      if (const Status released = engine_.hooks.release_derived(); !released) log().error("{}", released.error());
      return ok();
    });
    TORPOR_RETURN_IF_ERROR(engine_.hooks.rebuild_derived());
  }
  if (asleep.preserved) TORPOR_RETURN_IF_ERROR(engine_.hooks.reconnect(asleep.workers));
  if (drops_kv()) {
    TORPOR_RETURN_IF_ERROR(drop_old_kv());
  } else if (kv_of_old_weights || (asleep.preserved && !report_.reload.empty())) {
    TORPOR_RETURN_IF_ERROR(engine_.hooks.retire_prefix());
    report_.note = "the weights were written meanwhile: cached prefixes of the old ones are found no more";
    if (report_.requests > 0) report_.note += ", running requests keep their KV";
  }
  if (!report_.reload.empty()) report_.note = warning_of(End::kRuns);
  return ok();
}

Status WakeOperation::drop_old_kv() {
  const bool aborts = options_.old_kv == OldKv::kAbort;
  if (report_.requests > 0)
    operation_.irreversible(aborts ? "its requests may have ended" : "its requests may be computed again");
  TORPOR_RETURN_IF_ERROR(engine_.hooks.drop_requests(aborts ? "abort" : "recompute"));
  context_.asleep.deferrable_blocks.clear();  // also if this is undone: nothing is to be found in them any more
  if (report_.requests > 0)
    operation_.irreversible(aborts ? "its requests have ended" : "its requests are computed again");
  return ok();
}

// Send the last order of a wake. A rank that has carried it out cannot go back; so if not all carry it out, the engine
// is unrecoverable.
Status WakeOperation::finish(const std::vector<std::string>& tags) {
  const orders::Finish order{.tags = tags, .keep_backup = !drops_kv()};
  const auto attempt = [&]() -> Status {
    TORPOR_ASSIGN_OR_RETURN(const std::vector<orders::Finish::Reply> finished, engine_.ranks.call(order));
    std::vector<RankLedger> after = ledgers_of(finished);
    engine_.state.set_tags(finished);
    report_.ledgers = std::move(after);
    return ok();
  };
  const Status first = try_catch(attempt);
  if (first) return finished(tags), first;
  const Result<bool> none_finished = try_catch([&]() -> Result<bool> {
    TORPOR_ASSIGN_OR_RETURN(const Described described, engine_.ranks.call(orders::Describe{}));
    return std::none_of(described.begin(), described.end(), [&](const orders::Describe::Reply& reply) {
      return std::any_of(tags.begin(), tags.end(), [&](const std::string& tag) {
        const auto entry = reply.ledger.tags.find(tag);
        return entry != reply.ledger.tags.end() && entry->second.state == "attached";
      });
    });
  });
  if (none_finished && *none_finished) return first;
  const Status second = try_catch(attempt);
  if (!second) engine_.state.mark_unrecoverable(second.error());
  if (second) finished(tags);
  return second;
}

void WakeOperation::finished(const std::vector<std::string>& tags) noexcept {
  if (has_tag(tags, kKvCacheTag) && !context_.deferred.any()) engine_.release_host_slots();
}

// The engine runs: no sleep is in force any more.
void WakeOperation::let_run(bool weights_were_written) noexcept {
  SleepInForce& asleep = context_.asleep;
  if (weights_were_written) context_.wakes_name_old_kv = kv_is_said();
  report_.changed = true;
  report_.fully_awake = true;
  report_.metadata = std::move(asleep.metadata);
  report_.checkpoint = engine_.state.wake();
  if (asleep.checkpoint) context_.checkpoints.mark_woken(*asleep.checkpoint);
  asleep = {};
  context_.deferred.end_if_all_came();
}

// --- weights that were loaded during the sleep, or must be ---

// Return whether other weights were loaded since the engine fell asleep. Loading the same weights counts, too, if the
// caller has said what happens to old KV, or if it is not known that they are the same. Add to the report what must
// still be loaded.
Result<bool> WakeOperation::has_other_weights() {
  const bool loaded = report_.reload.empty();  // if not, they must still be loaded, whatever the caller said
  if (kv_is_said() && loaded) TORPOR_RETURN_IF_ERROR(engine_.ranks.call(orders::Inform{.written = {kWeightsTag}}));
  TORPOR_ASSIGN_OR_RETURN(const Described described, engine_.ranks.call(orders::Describe{}));
  for (const orders::Describe::Reply& reply : described) {
    for (const std::string& tag : reply.without_content) {
      if (tag != kKvCacheTag && !has_tag(report_.reload, tag)) report_.reload.push_back(tag);
    }
  }
  if (writes_of_weights(described) == context_.asleep.weights_writes) return false;
  if (kv_is_said() || !report_.reload.empty()) return true;
  TORPOR_ASSIGN_OR_RETURN(const bool same,
                          weights_have_digests(context_.engine, described, context_.asleep.weights_digests));
  return !same;
}

// Return whether requests are preserved that must wait until missing content is loaded.
Result<bool> WakeOperation::waits_for_weights() {
  if (report_.reload.empty() || !context_.asleep.preserved) return false;
  if (options_.others_wait) return true;
  TORPOR_ASSIGN_OR_RETURN(const int64_t requests, engine_.hooks.unfinished_requests());
  return requests > 0;
}

// Return and log a warning if a wake leaves tags without content.
std::string WakeOperation::warning_of(End end) const {
  std::string warning = joined(report_.reload, ", ");
  switch (end) {
    case End::kStillAsleep: return warning + " without content: to be loaded before the rest wakes";
    case End::kWaits:
      warning = fmt::format("nothing runs before {} loaded: load what is missing, then call wake_up() again", warning);
      break;
    case End::kRuns: warning += " without content: answers are wrong until what is missing is loaded"; break;
  }
  log().warn("wake: {}", warning);
  return warning;
}

// --- a checkpoint ---

Result<SleepReport> WakeOperation::wake_from_checkpoint() {
  report_.fully_awake = true;
  TORPOR_ASSIGN_OR_RETURN(const int64_t unfinished, engine_.hooks.unfinished_requests());
  if (unfinished > 0) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("this engine has {} requests of its own", unfinished),
                 .next_step = "wake the checkpoint in an engine without requests"};
  }
  context_.asleep.checkpoint.reset();
  if (Status restored = try_catch([&] { return restore_checkpoint(); }); !restored) {
    if (!options_.discard_on_restore_error || operation_.cancelled()) return restored.error();
    operation_.undo();
    if (engine_.state.unrecoverable()) return restored.error();
    log().error("waking without the state: {}", restored.error());
    context_.took_checkpoint = true;
    SleepReport discarded{.fully_awake = true, .checkpoint = std::move(report_.checkpoint)};
    discarded.note = fmt::format("the state was discarded: {}", restored.error().to_string());
    engine_.state.enter(EngineState::At::kAwake);
    return discarded;
  }
  report_.changed = true;
  if (options_.hold) {
    operation_.commit();
    context_.took_checkpoint = true;
    context_.wake_is_held = true;
    return std::move(report_);
  }
  TORPOR_RETURN_IF_ERROR(engine_.hooks.resume());
  operation_.commit();
  context_.took_checkpoint = true;
  engine_.state.enter(EngineState::At::kAwake);
  if (context_.asleep.checkpoint) context_.checkpoints.mark_woken(*context_.asleep.checkpoint);
  context_.asleep.checkpoint.reset();
  return std::move(report_);
}

Status WakeOperation::restore_checkpoint() {
  // If its features cannot be preserved, the engine cannot go on with the requests of another one either.
  TORPOR_ASSIGN_OR_RETURN(const std::vector<std::string> unsupported, engine_.hooks.unsupported());
  if (!unsupported.empty()) {
    return Error{.code = Code::kUnsupported,
                 .what = fmt::format("this engine cannot go on with saved requests yet: {}", joined(unsupported, "; ")),
                 .next_step = "wake them in an engine without these features"};
  }
  operation_.begin("open");
  std::optional<Checkpoint> checkpoint;  // none: all is computed anew
  EngineCheckpoint state;
  if (!options_.from_checkpoint.empty()) TORPOR_RETURN_IF_ERROR(open(checkpoint, state));
  operation_.end("open");  // no bytes of memory: it reads the state

  operation_.begin("quiesce");
  operation_.undo_with([this] { return engine_.hooks.resume(); });
  TORPOR_RETURN_IF_ERROR(engine_.hooks.quiesce(std::nullopt));
  operation_.end("quiesce");

  operation_.begin("restore");
  // The KV pool of an engine without requests has nothing that is still read, except cached prefixes.
  TORPOR_RETURN_IF_ERROR(engine_.hooks.drop_requests("abort"));
  std::vector<int32_t> deferred;
  if (checkpoint && options_.early) {
    deferred = deferred_blocks_of(state.state, blocks_by_need(state.state), engine_.hooks.holds_back());
    operation_.undo_with([this] { return context_.deferred.forget(); });
  }
  if (checkpoint) {
    orders::Restore order{.progress = options_.progress, .deferred = deferred};
    order.checkpoint = {.directory = checkpoint->path(),
                        .generation = checkpoint->manifest().generation,
                        .id = checkpoint->manifest().id,
                        .numbers = state.state.kv.block_numbers};
    TORPOR_ASSIGN_OR_RETURN(const std::vector<orders::Restore::Reply> loaded, engine_.ranks.call(order));
    for (const orders::Restore::Reply& reply : loaded) report_.deferred_bytes += reply.deferred_bytes;
    ranks_ = loaded.size();
    report_.restored_bytes = total_bytes(loaded);
    TORPOR_ASSIGN_OR_RETURN(const Described described, engine_.ranks.call(orders::Describe{}));
    report_.ledgers = ledgers_of(described);
    engine_.state.set_tags(described);
  } else {
    TORPOR_ASSIGN_OR_RETURN(state.state, engine_.hooks.capture());
    if (options_.catch_up) TORPOR_RETURN_IF_ERROR(options_.catch_up(state.state, /*woken_before=*/false));
  }
  operation_.end("restore", report_.restored_bytes);

  TORPOR_RETURN_IF_ERROR(operation_.go_on());
  operation_.begin("reconnect");
  operation_.undo_with([this] { return engine_.hooks.forget_restored(); });
  TORPOR_ASSIGN_OR_RETURN(report_.failed_requests, engine_.hooks.restore(state));
  if (checkpoint && engine_.options.checkpoints.incremental) send_contents(*checkpoint);
  if (!deferred.empty()) TORPOR_RETURN_IF_ERROR(context_.deferred.hold(deferred, ranks_, operation_));
  report_.deferred_blocks = static_cast<int64_t>(deferred.size());
  report_.requests = static_cast<int64_t>(state.state.scheduler.requests.size() - report_.failed_requests.size());
  report_.kept_blocks = static_cast<int64_t>(state.state.kv.blocks.size());
  report_.outputs = state.outputs;
  report_.metadata = state.metadata;
  operation_.end("reconnect");
  if (checkpoint) {
    context_.asleep.checkpoint = EngineCheckpoints::generation_at(checkpoint->path());
    context_.checkpoints.set_owner(checkpoint->manifest().owner);
  }
  return ok();
}

// Open the checkpoint, read its state, and check that it fits this engine.
Status WakeOperation::open(std::optional<Checkpoint>& checkpoint, EngineCheckpoint& state) {
  const std::shared_ptr<const Key>& key = engine_.options.checkpoints.key;
  TORPOR_ASSIGN_OR_RETURN(checkpoint, open_checkpoint(engine_.file_system, options_.from_checkpoint, key));
  report_.checkpoint = checkpoint->path();
  TORPOR_ASSIGN_OR_RETURN(state, checkpoint->read_state());
  TORPOR_RETURN_IF_ERROR(state.state.validate());
  TORPOR_ASSIGN_OR_RETURN(const Described described, engine_.ranks.call(orders::Describe{}));
  TORPOR_ASSIGN_OR_RETURN(const Fingerprint own, fingerprint_of(engine_, described, WeightsDigest::kReadOrProven));
  TORPOR_RETURN_IF_ERROR(check_fits(engine_.file_system, *checkpoint, own, options_.from_checkpoint, key.get()));
  report_.checkpoint_bytes = checkpoint->manifest().total_bytes();
  report_.unread_bytes = checkpoint->manifest().stored_bytes_but_of(kKvCacheTag);
  // This comes first: requests that have ended since need no blocks.
  if (options_.catch_up) TORPOR_RETURN_IF_ERROR(catch_up(*checkpoint, state.state));
  TORPOR_ASSIGN_OR_RETURN(FittedBlocks fitted, fit_blocks(state.state.kv, described));
  if (fitted.dropped > 0) log().warn("wake: {}", fitted.note);
  report_.dropped_blocks = fitted.dropped;
  report_.note = std::move(fitted.note);
  return ok();
}

Status WakeOperation::catch_up(const Checkpoint& checkpoint, CapturedState& state) {
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> directory,
                          engine_.file_system.open_directory(checkpoint.path(), false));
  const Result<std::unique_ptr<File>> mark = directory->open_file(kWokenFile);
  if (!mark && mark.error().code != Code::kNotFound) return mark.error();
  return options_.catch_up(state, mark.has_value());
}

// Send the ranks the content versions that the engine uses for the blocks that came back. A failure is logged; then the
// next checkpoint reads all blocks once.
void WakeOperation::send_contents(const Checkpoint& checkpoint) noexcept {
  const Status sent = try_catch([&]() -> Status {
    TORPOR_ASSIGN_OR_RETURN(KvContents contents, engine_.hooks.kv_contents());
    orders::Inform order;
    order.contents = {.id = checkpoint.manifest().id,
                      .blocks = std::move(contents.blocks),
                      .versions = std::move(contents.versions),
                      .steps = contents.steps};
    TORPOR_RETURN_IF_ERROR(engine_.ranks.call(order));
    return ok();
  });
  if (sent) return;
  (void)try_catch([&]() -> Status {
    log().warn("the next checkpoint will read all of the KV: {}", sent.error());
    return ok();
  });
}

}  // namespace torpor
