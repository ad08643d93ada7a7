// SPDX-License-Identifier: Apache-2.0
// SleepController::sleep(): the steps in their order.
#include "engine/sleep_controller.h"

#include <algorithm>

#include <fmt/core.h>

#include "base/log.h"
#include "base/text.h"
#include "engine/sleep_in_progress.h"

namespace torpor {
namespace {

// What is kept of an engine whose requests are dropped: the same engine, empty.
SchedulerCheckpoint without_requests(SchedulerCheckpoint state) {
  SchedulerSnapshot empty;
  empty.policy = state.scheduler.policy;
  state.scheduler = std::move(empty);
  KvSnapshot& kv = state.kv;
  for (KvGroup& group : kv.groups) group.tables.clear();
  kv.blocks.clear();
  kv.prefix_index.clear();
  kv.extra_hashes.clear();
  kv.free_order.clear();
  for (int32_t id = 0; id < kv.num_blocks; ++id) {
    if (id != kv.null_block) kv.free_order.push_back(id);
  }
  for (WorkerSnapshot& worker : state.workers) {
    worker.rows.clear();
    worker.generators.clear();
  }
  return state;
}

}  // namespace

// Undoes a failed sleep or checkpoint; the error says what of it stays all the same.
Error SleepController::undone(FallingAsleep& sleep, std::string_view call, Error error) noexcept {
  sleep.operation.failed(error);
  sleep.operation.undo();
  if (!lost()) set_state(sleep.deeper ? State::kAsleep : State::kAwake);
  const std::string_view irreversible = sleep.operation.irreversible();
  error.state_changed = lost() || sleep.checkpoint_stays || !irreversible.empty();
  (void)catching([&]() -> Status {
    std::string what = fmt::format("{}: {}", call, error.what);
    if (!irreversible.empty()) what += fmt::format("; {}", irreversible);
    if (sleep.checkpoint_stays) {
      what += sleep.report.checkpoint.empty() ? "; a checkpoint may be left behind"
                                              : fmt::format("; its checkpoint is {}", sleep.report.checkpoint);
    }
    error.what = std::move(what);
    return ok();
  });
  return error;
}

Result<SleepReport> SleepController::sleep(const SleepOptions& options) {
  return catching([&] { return options.swap_out_to.empty() ? sleep_now(options) : give_now(options); });
}

Result<SleepReport> SleepController::sleep_now(const SleepOptions& options) {
  if (!operation_mutex_.try_lock()) return busy();
  const MutexLock in_progress(operation_mutex_, std::adopt_lock);
  TORPOR_TRY(check(options));
  TORPOR_TRY(may_begin());
  TORPOR_TRY(wait_for_late());
  settle_behind("a sleep was asked for");
  const bool asleep = is_sleeping();
  if (asleep) {
    TORPOR_ASSIGN(const bool more, frees_more(options));
    if (!more) {
      log().warn("sleep: the engine is already asleep");
      SleepReport report;
      report.level = state().level;
      report.note = "already asleep";
      report.reload = empty_;
      if (options.drops(kWeightsTag) && !has_tag(empty_, kWeightsTag))
        report.note += fmt::format(" at level {}; what it saved stays: wake it to sleep deeper", report.level);
      return report;
    }
  }
  const auto begin = [&](FallingAsleep& sleep) TORPOR_REQUIRES(operation_mutex_) {
    sleep.deeper = asleep;
    set_state(State::kFallingAsleep);
    return catching([&]() TORPOR_REQUIRES(operation_mutex_) { return keep_all(sleep); });
  };
  if (options.data_parallel.size > 1) {
    auto held = std::make_unique<HeldSleep>(*this, "sleep", options, false);
    if (Status kept = begin(held->sleep); !kept) return undone(held->sleep, "sleep", std::move(kept).error());
    return hold_sleep(std::move(held));
  }
  FallingAsleep sleep(*this, "sleep", options);
  if (Status kept = begin(sleep); !kept) return undone(sleep, "sleep", std::move(kept).error());
  return fall_asleep(sleep);
}

Result<SleepReport> SleepController::fall_asleep(FallingAsleep& sleep) {
  if (Status asleep = catching([&]() TORPOR_REQUIRES(operation_mutex_) { return let_go(sleep); }); !asleep)
    return undone(sleep, "sleep", std::move(asleep).error());
  if (sleep.pending) sleep.pending->retire_older();
  return std::move(sleep.report);
}

// Of an engine that is asleep: whether there is memory left that this sleep would free.
Result<bool> SleepController::frees_more(const SleepOptions& options) {
  if (options.level == 0) return false;
  TORPOR_ASSIGN(const Described described, ranks_.call(orders::Describe{}));
  TORPOR_ASSIGN(const std::vector<std::string> tags, select_tags(options.tags, described.front().ledger));
  return std::any_of(tags.begin(), tags.end(), [&](const std::string& tag) TORPOR_REQUIRES(operation_mutex_) {
    return !has_tag(sleeping_tags_, tag);
  });
}

// All of a sleep that can be undone without a trace.
Status SleepController::keep_all(FallingAsleep& sleep) {
  const SleepOptions& options = sleep.options;
  SleepReport& report = sleep.report;
  report.level = options.level;
  report.to = options.to_disk ? "disk" : "host";
  TORPOR_TRY(admit(sleep));
  TORPOR_TRY(quiesce(sleep));
  while (options.level > 0) {
    const size_t steps = sleep.operation.steps();
    const Status kept = catching([&]() TORPOR_REQUIRES(operation_mutex_) { return keep(sleep); });
    if (kept) break;
    // Beyond the requests there is nothing that may be discarded: level 1 promises to keep the weights.
    if (!options.discard_on_save_error || (!sleep.to_disk && !sleep.preserved)) return kept.error();
    if (sleep.operation.cancelled()) return kept.error();
    sleep.operation.undo_to(steps);
    if (lost()) return kept.error();
    fall_back(sleep, kept.error());
  }
  return ok();
}

// The memory goes.
Status SleepController::let_go(FallingAsleep& sleep) {
  const SleepOptions& options = sleep.options;
  SleepReport& report = sleep.report;
  std::string checkpoint = report.checkpoint;
  std::vector<std::string> sleeping = sleeping_tags_;
  if (options.level > 0) sleeping.insert(sleeping.end(), sleep.tags.begin(), sleep.tags.end());
  sort_for_wake(sleeping);
  std::vector<uint64_t> writes = writes_of(sleep.described);
  // The generators are where they were when the requests were first kept.
  const bool same_workers = sleep.deeper && preserved_ && sleep.preserved;
  std::optional<RestoredFrom> from;
  if (sleep.pending)
    from = {.directory = directory_of(options.data_parallel), .generation = sleep.pending->generation()};
  Metadata metadata = report.metadata;
  if (!sleep.alone) TORPOR_TRY(sleep.operation.go_on());
  std::vector<std::string> weights = weights_of_kv(sleep);
  if (options.level > 0) say_what_to_load(sleep);
  std::vector<std::string> empty = report.reload;
  empty.insert(empty.end(), empty_.begin(), empty_.end());  // none, unless `deeper`
  if (options.level > 0) TORPOR_TRY(detach(sleep));
  // From here on nothing fails: the memory is gone.
  sleep.operation.keep();
  report.changed = true;
  report.preserve_state = sleep.preserved;
  preserved_ = sleep.preserved && options.level > 0;
  derived_released_ = options.level > 0;
  sleeping_tags_ = std::move(sleeping);
  if (has_tag(sleep.tags, kKvCacheTag)) late_blocks_ = std::move(sleep.late);
  if (!same_workers) workers_ = std::move(sleep.captured.state.workers);
  if (!sleep.deeper) writes_ = std::move(writes);
  if (!sleep.deeper || !weights.empty()) weights_ = std::move(weights);
  empty_ = std::move(empty);
  if (!sleep.deeper || from) restored_from_ = std::move(from);
  sleep.operation.fill(report);
  const MutexLock lock(state_mutex_);
  set_state_locked(State::kAsleep);
  public_.level = std::max(public_.level, options.level);
  if (!sleep.deeper || !checkpoint.empty()) {
    public_.checkpoint = std::move(checkpoint);
    metadata_ = std::move(metadata);
  }
  return ok();
}

// For a checkpoint, of the tags that are in it.
Status SleepController::has_kv(const std::vector<std::string>& tags) {
  if (has_tag(tags, kKvCacheTag)) return ok();
  return Error{.code = Code::kInvalidArgument,
               .what = "a checkpoint of running requests needs their KV",
               .next_step = "add \"kv_cache\" to tags"};
}

// Refuses what cannot be done, before anything is touched.
Status SleepController::admit(FallingAsleep& sleep) {
  const SleepOptions& options = sleep.options;
  TORPOR_ASSIGN(sleep.described, ranks_.call(orders::Describe{}));
  remember(sleep.described);
  TORPOR_ASSIGN(sleep.tags, select_tags(options.tags, sleep.described.front().ledger));
  if (options.to_disk && !sleeping_tags_.empty()) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("{} asleep already: a checkpoint is made of memory that is there",
                                     joined(sleeping_tags_, ", ")),
                 .next_step = "wake it first, or sleep to host"};
  }
  if (options.to_disk) TORPOR_TRY(has_content(sleep.described));
  std::erase_if(sleep.tags,
                [&](const std::string& tag) TORPOR_REQUIRES(operation_mutex_) { return has_tag(sleeping_tags_, tag); });
  if (options.preserve_state && options.to_disk) TORPOR_TRY(has_kv(sleep.tags));
  sleep.save.progress = options.progress;
  for (const std::string& tag : sleep.tags) {
    if (!options.drops(tag)) sleep.save.tags.push_back(tag);
    // Once a checkpoint has the weights, those after it keep the file: no later sleep need write it again.
    if (tag == kWeightsTag && options.weights == Weights::kReload) sleep.save.carried.push_back(tag);
  }
  if (!options.preserve_state || options.level == 0) return ok();
  return can_preserve("sleep with preserve_state=False, or without these features");
}

Status SleepController::quiesce(FallingAsleep& sleep) {
  sleep.operation.begin("quiesce");
  if (!sleep.deeper) {
    sleep.operation.undo_with([this] { return hooks_.resume(); });
    TORPOR_TRY(hooks_.quiesce(sleep.options.timeout_seconds));
  }
  TORPOR_ASSIGN(sleep.report.requests, hooks_.unfinished_requests());
  sleep.operation.end("quiesce");
  return ok();
}

// All that is kept, in memory or on disk.
Status SleepController::keep(FallingAsleep& sleep) {
  TORPOR_TRY(prepare(sleep));
  TORPOR_TRY(sleep.operation.go_on());
  TORPOR_TRY(save(sleep));
  TORPOR_TRY(sleep.operation.go_on());
  return prove(sleep);
}

// on_save_error="discard": what cannot go to disk is kept in host memory, requests that have no room there are dropped.
// Precondition: what was done to keep it is undone.
void SleepController::fall_back(FallingAsleep& sleep, const Error& why) {
  SleepReport& report = sleep.report;
  const std::string what = sleep.to_disk ? "it is kept in host memory, not on disk" : "the state was discarded";
  log().error("sleep: {}: {}", what, why.to_string());
  if (!report.note.empty()) report.note += "; ";
  report.note += fmt::format("{}: {}", what, why.to_string());
  if (std::exchange(sleep.checkpoint_stays, false)) report.note += "; a checkpoint may be left behind";
  if (std::exchange(sleep.to_disk, false)) {
    report.to = "host";
  } else {
    sleep.preserved = false;
    std::erase(sleep.save.tags, kKvCacheTag);
  }
  sleep.pending.reset();
  sleep.captured = {};
  sleep.live = {};
  sleep.late.clear();
  sleep.save.directory.clear();
  sleep.save.writing = {};
  sleep.save.blocks.clear();
  sleep.save.stamps.clear();
  sleep.save.host_slots.clear();
  report.checkpoint.clear();
  report.checkpoint_bytes = 0;
  report.checkpoint_parts.clear();
}

// The state as values.
Status SleepController::capture(FallingAsleep& sleep) {
  const bool with_kv = has_tag(sleep.tags, kKvCacheTag);
  sleep.operation.begin("capture");
  TORPOR_ASSIGN(sleep.captured.state, hooks_.capture());
  if (!sleep.preserved) sleep.captured.state = without_requests(std::move(sleep.captured.state));
  TORPOR_TRY(sleep.captured.state.validate());
  sleep.captured.outputs = sleep.options.outputs;
  sleep.captured.metadata = sleep.options.metadata;
  if (with_kv) {
    sleep.live =
        select_live_blocks(sleep.captured.state.kv, block_bytes(sleep.described).most, options_.kv_budget_bytes);
  }
  drop_hashes(sleep.captured.state.kv, sleep.live.dropped);
  name_blocks(sleep.save, sleep.captured.state, sleep.live.kept);
  sleep.late = late_blocks_of(sleep.captured.state, sleep.save.blocks, hooks_.holds_back());
  if (with_kv && !sleep.to_disk) TORPOR_TRY(keep_host_slots(sleep));
  if (sleep.to_disk) {
    // Weights that are saved are read then, and not twice: save() adds what they are.
    WeightsDigest digest = options_.always_read_weights ? WeightsDigest::kRead : WeightsDigest::kReadOrProven;
    if (has_tag(sleep.save.tags, kWeightsTag)) digest = WeightsDigest::kNone;
    TORPOR_ASSIGN(sleep.captured.fingerprint, fingerprint_of(sleep.described, digest));
  }
  sleep.operation.end("capture");
  return ok();
}

// That and, to disk, its part of the checkpoint: durable before memory is touched.
Status SleepController::prepare(FallingAsleep& sleep) {
  const SleepOptions& options = sleep.options;
  if (!sleep.preserved && !sleep.to_disk) return ok();
  if (sleep.deeper && preserved_ && !has_tag(sleep.tags, kKvCacheTag)) return ok();  // it was captured then
  TORPOR_TRY(capture(sleep));
  if (!sleep.to_disk) return ok();

  sleep.operation.begin("commit");
  uint64_t expected = sleep.live.kept.size() * block_bytes(sleep.described).all;
  for (const std::string& tag : sleep.save.tags) {
    if (tag != kKvCacheTag) expected += tag_bytes(sleep.described, tag, &RankLedger::Tag::region_bytes);
  }
  TORPOR_ASSIGN(sleep.checkpoints, manager(directory_of(options.data_parallel)));
  TORPOR_ASSIGN(sleep.pending, sleep.checkpoints->begin(expected));
  if (sleep.described.size() > 1) TORPOR_TRY(all_see(*sleep.pending));
  TORPOR_TRY(sleep.pending->write_state(sleep.captured));
  sleep.save.directory = sleep.pending->staging_path();
  sleep.save.writing = sleep.pending->writing();
  sleep.save.as_proven = !options_.always_read_weights;
  sleep.operation.end("commit");
  return ok();
}

// What the engine offloaded and has not changed since need not be copied: it stays where it is.
Status SleepController::keep_host_slots(FallingAsleep& sleep) {
  sleep.operation.undo_with([this]() -> Status { return release_host_slots(), ok(); });
  TORPOR_ASSIGN(sleep.save.host_slots, hooks_.host_slots(sleep.save.blocks, /*keep=*/true));
  return ok();
}

// Where it fails, an engine has so much less room to offload to.
void SleepController::release_host_slots() noexcept {
  (void)catching([&]() -> Status {
    if (const Status released = hooks_.release_host_slots(); !released) log().error("{}", released.error().to_string());
    return ok();
  });
}

// Copies what is kept to the arena or into the checkpoint under construction.
Status SleepController::save(FallingAsleep& sleep) {
  sleep.operation.begin("save");
  sleep.operation.undo_with([this, &sleep]() -> Status {
    if (!sleep.save.room.empty()) TORPOR_TRY(take_back(sleep));
    TORPOR_TRY(ranks_.undo(orders::CancelSave{.tags = sleep.save.tags}));
    return ok();
  });
  TORPOR_ASSIGN(const std::vector<orders::Save::Reply> saved, ranks_.call(sleep.save));
  if (sleep.pending) {
    for (const orders::Save::Reply& reply : saved) {
      for (const auto& [tag, sums] : reply.saved.tags) sleep.report.checkpoint_parts[tag] += sums.stored_bytes;
      sleep.pending->add_rank(reply.saved);
    }
    if (has_tag(sleep.save.tags, kWeightsTag)) {
      TORPOR_ASSIGN(const bool named, add_named_weights(sleep.captured.fingerprint, sleep.save.as_proven));
      if (!named) add_weights(sleep.captured.fingerprint, saved);
    }
    sleep.pending->set_fingerprint(sleep.captured.fingerprint);
  }
  for (const orders::Save::Reply& reply : saved) {
    const auto weights = reply.digests.find(kWeightsTag);
    sleep.saved_weights.push_back(weights == reply.digests.end() ? "" : weights->second);
  }
  sleep.report.saved_bytes = total_bytes(saved);
  for (const orders::Save::Reply& reply : saved) {
    sleep.report.compacted_bytes += reply.compacted_bytes;
    sleep.report.reused_bytes += reply.reused_bytes;
    sleep.report.disk_bytes += sleep.pending ? reply.bytes + reply.reused_bytes : reply.spilled_bytes;
  }
  sleep.report.host_bytes = sleep.report.saved_bytes + sleep.report.reused_bytes - sleep.report.disk_bytes;
  sleep.operation.end("save", sleep.report.saved_bytes);
  return ok();
}

// Every chunk has its digest by now; to disk, the checkpoint becomes visible and durable.
Status SleepController::prove(FallingAsleep& sleep) {
  sleep.operation.begin("verify");
  if (sleep.pending) {
    SleepReport& report = sleep.report;
    sleep.operation.undo_with([&sleep]() -> Status {
      if (sleep.pending->withdraw() || sleep.pending->withdraw()) sleep.checkpoint_stays = false;
      return ok();  // else the error says that it is there
    });
    sign(*sleep.pending, sleep.captured.fingerprint);
    sleep.checkpoint_stays = true;
    TORPOR_ASSIGN(report.checkpoint, sleep.pending->commit());
    TORPOR_ASSIGN(const Checkpoint committed,
                  open_checkpoint(file_system_, report.checkpoint, options_.checkpoints.key));
    report.checkpoint_bytes = committed.manifest().total_bytes();
    report.metadata = sleep.captured.metadata;
    for (const SectionInfo& section : committed.manifest().sections)
      report.checkpoint_parts[section.name] = section.stored_bytes;
    TORPOR_TRY(ranks_.call(orders::Moved{.directory = report.checkpoint}));
  }
  sleep.operation.end("verify");
  return ok();
}

// What goes with the memory. Last of all that can fail but the release itself: requests that were ended stay so.
Status SleepController::drop(FallingAsleep& sleep) {
  if (!sleep.preserved) {
    const bool recompute = sleep.options.in_flight == "recompute";
    const bool any = sleep.report.requests > 0;
    if (any)
      sleep.operation.irreversible(recompute ? "its requests may be computed again" : "its requests may be ended");
    TORPOR_TRY(hooks_.drop_requests(recompute ? "recompute" : "abort"));
    if (any) sleep.operation.irreversible(recompute ? "its requests are computed again" : "its requests were ended");
    return ok();
  }
  // Hashes of bytes that are not kept must not be hit after the wake.
  return sleep.live.dropped.empty() ? ok() : hooks_.drop_prefix(sleep.live.dropped);
}

Status SleepController::release(FallingAsleep& sleep) {
  if (!derived_released_) sleep.operation.undo_with([this] { return hooks_.rebuild_derived(); });
  TORPOR_TRY(hooks_.release_derived());
  return drop(sleep);
}

Status SleepController::detach(FallingAsleep& sleep) {
  sleep.operation.begin("detach");
  SleepReport& report = sleep.report;
  if (sleep.save.room.empty()) TORPOR_TRY(release(sleep));
  report.dropped_blocks = static_cast<int64_t>(sleep.live.dropped.size());
  if (sleep.preserved) report.kept_blocks = static_cast<int64_t>(sleep.live.kept.size());

  sleep.operation.undo_with([this, &sleep] { return undo_detach(sleep.tags); });
  TORPOR_ASSIGN(const std::vector<orders::Detach::Reply> detached, ranks_.call(orders::Detach{.tags = sleep.tags}));
  report.freed_bytes = total_bytes(detached);
  report.ledgers = ledgers_of(detached);
  remember(detached);
  sleep.operation.end("detach", report.freed_bytes);
  return ok();
}

// After a detach that failed on some rank: bring the others back from their backups.
Status SleepController::undo_detach(const std::vector<std::string>& tags) {
  TORPOR_ASSIGN(const std::vector<orders::Restore::Reply> restored, ranks_.undo(orders::Restore{.tags = tags}));
  for (const orders::Restore::Reply& reply : restored) {
    if (has_tag(reply.without_content, kWeightsTag)) {
      return Error{.code = Code::kDevice,
                   .what = "the weights of a rank are gone, those of another are not",
                   .next_step = "start a new engine",
                   .origin = Origin::kDevice};
    }
  }
  TORPOR_TRY(ranks_.undo(orders::Finish{.tags = tags}));
  TORPOR_ASSIGN(const Described described, ranks_.call(orders::Describe{}));
  remember(described);
  for (const orders::Describe::Reply& reply : described) {
    for (const auto& [tag, entry] : reply.ledger.tags) {
      if (has_tag(tags, tag) && entry.state != "attached" && entry.state != "saving") {
        return Error{.code = Code::kDevice,
                     .what = fmt::format("the tag {} is {}", tag, entry.state),
                     .next_step = "start a new engine and wake it from its last checkpoint",
                     .origin = Origin::kDevice};
      }
    }
  }
  return ok();
}

}  // namespace torpor
