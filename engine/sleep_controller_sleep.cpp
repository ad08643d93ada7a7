// SleepController::sleep(): the steps in their order.
#include "engine/sleep_controller.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/log.h"

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

// A sleep or checkpoint in progress: what was asked, what was found out, what is under way.
struct SleepController::FallingAsleep {
  FallingAsleep(SleepController& controller, std::string_view name, const SleepOptions& asked)
      : options(asked),
        preserved(asked.preserve_state),
        to_disk(asked.to_disk),
        operation(name, controller.clock_, controller.sink_, controller) {}

  const SleepOptions& options;
  SleepReport report{};
  std::vector<RankReply> described{};
  std::vector<std::string> tags{};  // that lose their memory
  RankOrder save{};                 // what is copied before
  bool deeper = false;              // the engine is asleep already, and stays so if this fails
  bool preserved = false;           // the requests' state is kept; false after it was discarded
  bool to_disk = false;             // false after that failed
  EngineCheckpoint captured{};
  LiveBlocks live{};
  std::unique_ptr<CheckpointManager> checkpoints{};
  std::optional<PendingCheckpoint> pending{};  // kept to the end: with its lock a commit can be taken back, or older
                                               // ones can go
  bool checkpoint_stays = false;               // it was committed, and not taken back
  Operation operation;                         // last: its undo needs all of the above
};

// One that waits for end_sleep(), with what it was asked for.
struct SleepController::HeldSleep {
  HeldSleep(SleepController& controller, std::string_view name, const SleepOptions& asked, bool checkpoint)
      : options(asked), only_checkpoint(checkpoint), sleep(controller, name, options) {}

  const SleepOptions options;
  const bool only_checkpoint;
  FallingAsleep sleep;
};

SleepController::SleepController(EngineHooks& hooks, FileSystem& file_system, const Clock& clock,
                                 SleepControllerOptions options, EventSink* sink)
    : hooks_(hooks),
      file_system_(file_system),
      clock_(clock),
      options_(std::move(options)),
      sink_(sink),
      ranks_(hooks_) {}

// What is held is undone: the requests go on, if anybody can still ask for them.
SleepController::~SleepController() { held_sleep_.reset(); }

// Undoes a failed sleep or checkpoint; the error says what of it stays all the same.
Error SleepController::undone(FallingAsleep& sleep, std::string_view call, Error error) noexcept {
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
  return catching([&] { return sleep_now(options); });
}

Result<SleepReport> SleepController::sleep_now(const SleepOptions& options) {
  if (!operation_mutex_.try_lock()) return busy();
  const MutexLock in_progress(operation_mutex_, std::adopt_lock);
  TORPOR_TRY(check(options));
  TORPOR_TRY(may_begin());
  const bool asleep = is_sleeping();
  if (asleep) {
    TORPOR_ASSIGN(const bool more, frees_more(options));
    if (!more) {
      log().warn("sleep: the engine is already asleep");
      SleepReport report;
      report.level = state().level;
      report.note = "already asleep";
      if (options.level > report.level)
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

Result<SleepReport> SleepController::hold_sleep(std::unique_ptr<HeldSleep> sleep) {
  Result<SleepReport> report = catching([&]() -> Result<SleepReport> { return sleep->sleep.report; });
  if (!report) return undone(sleep->sleep, "sleep", std::move(report).error());
  report->held = true;
  held_sleep_ = std::move(sleep);
  return report;
}

Result<SleepReport> SleepController::end_sleep(bool keep) {
  return catching([&] { return end_sleep_now(keep); });
}

Result<SleepReport> SleepController::end_sleep_now(bool keep) {
  const MutexLock in_progress(operation_mutex_);
  if (held_sleep_ == nullptr)
    return Error{.code = Code::kFailedPrecondition, .what = "no sleep is held", .next_step = "sleep with hold first"};
  const std::unique_ptr<HeldSleep> held = std::move(held_sleep_);
  if (keep) return held->only_checkpoint ? serve_on(held->sleep) : fall_asleep(held->sleep);
  const std::string_view call = held->only_checkpoint ? "checkpoint" : "sleep";
  Error error = undone(held->sleep, call, {.code = Code::kAborted, .what = "it was taken back", .next_step = "none"});
  if (error.state_changed) return error;
  SleepReport report;
  report.note = "taken back";
  report.fully_awake = !is_sleeping();
  return report;
}

// Of an engine that is asleep: whether there is memory left that this sleep would free.
Result<bool> SleepController::frees_more(const SleepOptions& options) {
  if (options.level == 0) return false;
  TORPOR_ASSIGN(const std::vector<RankReply> described, ranks_.call("describe", {}));
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
  std::vector<std::map<std::string, uint64_t>> writes;
  for (const RankReply& reply : sleep.described) writes.push_back(reply.writes);
  // The generators are where they were when the requests were first kept.
  const bool same_workers = sleep.deeper && preserved_ && sleep.preserved;
  std::optional<RestoredFrom> from;
  if (sleep.pending)
    from = {.directory = directory_of(options.data_parallel), .generation = sleep.pending->generation()};
  if (options.level > 0) TORPOR_TRY(detach(sleep));
  // From here on nothing fails: the memory is gone.
  sleep.operation.keep();
  report.changed = true;
  report.preserve_state = sleep.preserved;
  preserved_ = sleep.preserved && options.level > 0;
  derived_released_ = options.level > 0;
  sleeping_tags_ = std::move(sleeping);
  if (!same_workers) workers_ = std::move(sleep.captured.state.workers);
  if (!sleep.deeper) writes_ = std::move(writes);
  if (!sleep.deeper || from) restored_from_ = std::move(from);
  sleep.operation.fill(report);
  const MutexLock lock(state_mutex_);
  state_ = State::kAsleep;
  public_.level = std::max(public_.level, options.level);
  if (!sleep.deeper || !checkpoint.empty()) public_.checkpoint = std::move(checkpoint);
  return ok();
}

Result<SleepReport> SleepController::checkpoint(const Value& outputs, DataParallel data_parallel) {
  return catching([&] { return checkpoint_now(outputs, data_parallel); });
}

Result<SleepReport> SleepController::checkpoint_now(const Value& outputs, DataParallel data_parallel) {
  if (!operation_mutex_.try_lock()) return busy();
  const MutexLock in_progress(operation_mutex_, std::adopt_lock);
  const SleepOptions options{.preserve_state = true,
                             .to_disk = true,
                             .store_weights = false,
                             .outputs = outputs,
                             .data_parallel = data_parallel};
  TORPOR_TRY(check(options));
  TORPOR_TRY(may_begin());
  if (is_sleeping())
    return Error{.code = Code::kFailedPrecondition,
                 .what = "the engine is asleep",
                 .next_step = "wake it first, or let it sleep to disk"};
  const auto write = [&](FallingAsleep& sleep) TORPOR_REQUIRES(operation_mutex_) {
    set_state(State::kFallingAsleep);
    return catching([&]() TORPOR_REQUIRES(operation_mutex_) -> Status {
      sleep.report.to = "disk";
      sleep.report.preserve_state = true;
      TORPOR_TRY(admit(sleep));
      TORPOR_TRY(quiesce(sleep));
      return keep(sleep);
    });
  };
  if (data_parallel.size > 1) {
    auto held = std::make_unique<HeldSleep>(*this, "checkpoint", options, true);
    if (Status written = write(held->sleep); !written)
      return undone(held->sleep, "checkpoint", std::move(written).error());
    return hold_sleep(std::move(held));
  }
  FallingAsleep sleep(*this, "checkpoint", options);
  if (Status written = write(sleep); !written) return undone(sleep, "checkpoint", std::move(written).error());
  return serve_on(sleep);
}

// The checkpoint is whole, and the engine goes on.
Result<SleepReport> SleepController::serve_on(FallingAsleep& sleep) {
  SleepReport& report = sleep.report;
  const Status released = catching([&]() -> Status {
    TORPOR_TRY(ranks_.undo("cancel_save", {.tags = sleep.save.tags}));  // the memory was only read
    return ok();
  });
  if (!released) return undone(sleep, "checkpoint", released.error());
  sleep.operation.keep();
  if (Status resumed = hooks_.resume(); !resumed) {
    lose(resumed.error());
    return undone(sleep, "checkpoint", std::move(resumed).error());
  }
  set_state(State::kAwake);
  report.kept_blocks = static_cast<int64_t>(sleep.live.kept.size());
  report.changed = true;
  report.fully_awake = true;
  sleep.operation.fill(report);
  sleep.pending->retire_older();  // while the engine runs again
  return std::move(report);
}

// Refuses what cannot be done, before anything is touched.
Status SleepController::admit(FallingAsleep& sleep) {
  const SleepOptions& options = sleep.options;
  TORPOR_ASSIGN(sleep.described, ranks_.call("describe", {}));
  remember(sleep.described);
  TORPOR_ASSIGN(sleep.tags, select_tags(options.tags, sleep.described.front().ledger));
  if (options.to_disk && !sleeping_tags_.empty()) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("{} asleep already: a checkpoint is made of memory that is there",
                                     fmt::join(sleeping_tags_, ", ")),
                 .next_step = "wake it first, or sleep to host"};
  }
  for (const RankReply& reply : sleep.described) {
    if (!options.to_disk || reply.without_content.empty()) continue;
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("{} came back without content and were not loaded since",
                                     fmt::join(reply.without_content, ", ")),
                 .next_step = "load them, so that the checkpoint names what its tokens come from"};
  }
  std::erase_if(sleep.tags,
                [&](const std::string& tag) TORPOR_REQUIRES(operation_mutex_) { return has_tag(sleeping_tags_, tag); });
  if (options.preserve_state && options.to_disk && !has_tag(sleep.tags, kKvCacheTag)) {
    return Error{.code = Code::kInvalidArgument,
                 .what = "a checkpoint of running requests needs their KV",
                 .next_step = "add \"kv_cache\" to tags"};
  }
  for (const std::string& tag : sleep.tags) {
    if (!options.drops(tag)) sleep.save.tags.push_back(tag);
  }
  if (!options.preserve_state || options.level == 0) return ok();
  TORPOR_ASSIGN(const std::vector<std::string> unsupported, hooks_.unsupported());
  if (unsupported.empty()) return ok();
  return Error{
      .code = Code::kUnsupported,
      .what = fmt::format("the state of this engine cannot be preserved yet: {}", fmt::join(unsupported, "; ")),
      .next_step = "sleep with preserve_state=False, or without these features"};
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
  TORPOR_TRY(save(sleep));
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
  sleep.save.directory.clear();
  sleep.save.writing = {};
  sleep.save.blocks.clear();
  report.checkpoint.clear();
  report.checkpoint_bytes = 0;
  report.checkpoint_parts.clear();
}

// The state as values and, to disk, that part of the checkpoint: durable before memory is touched.
Status SleepController::prepare(FallingAsleep& sleep) {
  const SleepOptions& options = sleep.options;
  const bool with_kv = has_tag(sleep.tags, kKvCacheTag);
  if (!sleep.preserved && !sleep.to_disk) return ok();
  if (sleep.deeper && preserved_ && !with_kv) return ok();  // it was captured then
  sleep.operation.begin("capture");
  TORPOR_ASSIGN(sleep.captured.state, hooks_.capture());
  if (!sleep.preserved) sleep.captured.state = without_requests(std::move(sleep.captured.state));
  TORPOR_TRY(sleep.captured.state.validate());
  sleep.captured.outputs = options.outputs;
  const BlockBytes block = block_bytes(sleep.described);
  if (with_kv) sleep.live = select_live_blocks(sleep.captured.state.kv, block.most, options_.kv_budget_bytes);
  drop_hashes(sleep.captured.state.kv, sleep.live.dropped);
  sleep.save.blocks = sleep.live.kept;
  if (sleep.to_disk) {
    TORPOR_ASSIGN(sleep.captured.fingerprint, fingerprint());
  }
  sleep.operation.end("capture");
  if (!sleep.to_disk) return ok();

  sleep.operation.begin("commit");
  uint64_t expected = sleep.live.kept.size() * block.all;
  for (const std::string& tag : sleep.save.tags) {
    if (tag != kKvCacheTag) expected += tag_bytes(sleep.described, tag, &RankLedger::Tag::region_bytes);
  }
  TORPOR_ASSIGN(sleep.checkpoints, manager(directory_of(options.data_parallel)));
  TORPOR_ASSIGN(sleep.pending, sleep.checkpoints->begin(expected));
  TORPOR_TRY(sleep.pending->write_state(sleep.captured));
  sleep.save.directory = sleep.pending->staging_path();
  sleep.save.writing = sleep.pending->writing();
  sleep.operation.end("commit");
  return ok();
}

// Copies what is kept to the arena or into the checkpoint under construction.
Status SleepController::save(FallingAsleep& sleep) {
  sleep.operation.begin("save");
  sleep.operation.undo_with([this, &sleep]() -> Status {
    TORPOR_TRY(ranks_.undo("cancel_save", {.tags = sleep.save.tags}));
    return ok();
  });
  TORPOR_ASSIGN(const std::vector<RankReply> saved, ranks_.call("save", sleep.save));
  for (const RankReply& reply : saved) {
    if (!sleep.pending) break;
    for (const SavedChunk& chunk : reply.chunks.chunks)
      sleep.report.checkpoint_parts[chunk.key.tag] += chunk.stored_bytes;
    sleep.pending->add_rank(reply.chunks);
  }
  sleep.report.saved_bytes = total_bytes(saved);
  sleep.operation.end("save", sleep.report.saved_bytes);
  return ok();
}

// Every chunk has its digest by now; to disk, the checkpoint becomes visible and durable.
Status SleepController::prove(FallingAsleep& sleep) {
  sleep.operation.begin("prove");
  if (sleep.pending) {
    SleepReport& report = sleep.report;
    sleep.operation.undo_with([&sleep]() -> Status {
      if (sleep.pending->withdraw() || sleep.pending->withdraw()) sleep.checkpoint_stays = false;
      return ok();  // else the error says that it is there
    });
    sleep.checkpoint_stays = true;
    TORPOR_ASSIGN(report.checkpoint, sleep.pending->commit());
    TORPOR_ASSIGN(const Checkpoint committed,
                  open_checkpoint(file_system_, report.checkpoint, options_.checkpoints.key));
    report.checkpoint_bytes = committed.manifest().total_bytes();
    for (const SectionInfo& section : committed.manifest().sections)
      report.checkpoint_parts[section.name] = section.stored_bytes;
    TORPOR_TRY(ranks_.call("moved", {.directory = report.checkpoint}));
  }
  sleep.operation.end("prove");
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

Status SleepController::detach(FallingAsleep& sleep) {
  sleep.operation.begin("detach");
  SleepReport& report = sleep.report;
  if (!derived_released_) sleep.operation.undo_with([this] { return hooks_.rebuild_derived(); });
  TORPOR_TRY(hooks_.release_derived());
  TORPOR_TRY(drop(sleep));
  report.dropped_blocks = static_cast<int64_t>(sleep.live.dropped.size());
  if (sleep.preserved) report.kept_blocks = static_cast<int64_t>(sleep.live.kept.size());

  sleep.operation.undo_with([this, &sleep] { return undo_detach(sleep.tags); });
  TORPOR_ASSIGN(const std::vector<RankReply> detached, ranks_.call("detach", {.tags = sleep.tags}));
  report.freed_bytes = total_bytes(detached);
  report.ledgers = ledgers_of(detached);
  remember(detached);
  sleep.operation.end("detach", report.freed_bytes);
  return ok();
}

// After a detach that failed on some rank: bring the others back from their backups.
Status SleepController::undo_detach(const std::vector<std::string>& tags) {
  TORPOR_TRY(ranks_.undo("attach", {.tags = tags}));
  TORPOR_ASSIGN(const std::vector<RankReply> restored, ranks_.undo("restore", {.tags = tags}));
  for (const RankReply& reply : restored) {
    if (!reply.error && has_tag(reply.without_content, kWeightsTag)) {
      return Error{.code = Code::kDevice,
                   .what = "the weights of a rank are gone, those of another are not",
                   .next_step = "start a new engine",
                   .origin = Origin::kDevice};
    }
  }
  TORPOR_TRY(ranks_.undo("finish", {.tags = tags}));
  TORPOR_ASSIGN(const std::vector<RankReply> described, ranks_.call("describe", {}));
  remember(described);
  for (const RankReply& reply : described) {
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
