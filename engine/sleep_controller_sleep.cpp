// SleepController::sleep(): the steps in their order.
#include "engine/sleep_controller.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/log.h"
#include "engine/operation.h"

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

// A sleep in progress: what was asked, what was found out, what is under way.
struct SleepController::FallingAsleep {
  const SleepOptions& options;
  Operation& operation;
  SleepReport report{};
  std::vector<RankReply> described{};
  std::vector<std::string> tags{};  // that lose their memory
  RankOrder save{};                 // what is copied before
  bool preserved = false;           // the requests' state is kept; false after it was discarded
  EngineCheckpoint captured{};
  LiveBlocks live{};
  std::shared_ptr<CheckpointManager> checkpoints{};  // shared with the step that undoes the commit
  std::optional<PendingCheckpoint> pending{};
};

Result<SleepReport> SleepController::sleep(const SleepOptions& options) {
  const std::unique_lock busy(operation_mutex_, std::try_to_lock);
  if (!busy.owns_lock()) {
    return Error{.code = Code::kUnavailable,
                 .what = fmt::format("the engine is {}", state().engine),
                 .next_step = "wait for that to end"};
  }
  TORPOR_TRY(check(options));
  TORPOR_TRY(may_begin());
  if (is_sleeping()) {
    log().warn("sleep: the engine is already asleep");
    SleepReport report;
    report.note = "already asleep";
    report.level = state().level;
    return report;
  }
  Operation operation("sleep", clock_, sink_, [this] { return lost(); });
  set_state(State::kFallingAsleep);
  Result<SleepReport> report = fall_asleep(options, operation);
  if (!report) {
    operation.undo();
    if (!lost()) set_state(State::kAwake);
    Error error = std::move(report).error();
    error.state_changed = lost();
    return error.within("sleep");
  }
  operation.keep();
  operation.fill(*report);
  return report;
}

Result<SleepReport> SleepController::fall_asleep(const SleepOptions& options, Operation& operation) {
  FallingAsleep sleep{.options = options, .operation = operation, .preserved = options.preserve_state};
  sleep.report.level = options.level;
  sleep.report.to = options.to_disk ? "disk" : "host";
  TORPOR_TRY(admit(sleep));
  TORPOR_TRY(quiesce(sleep));
  if (options.level > 0) {
    if (Status prepared = prepare(sleep); !prepared) {
      if (!options.discard_on_save_error) return prepared.error();
      discard(sleep, prepared.error());
    }
    TORPOR_TRY(save(sleep));
    TORPOR_TRY(prove(sleep));
    // Requests are dropped last, when nothing but the release of memory is left to fail.
    if (!sleep.preserved) TORPOR_TRY(hooks_.drop_requests(options.in_flight == "freeze" ? "abort" : options.in_flight));
    TORPOR_TRY(detach(sleep));
  }
  sleep.report.changed = true;
  sleep.report.preserve_state = sleep.preserved;
  preserved_ = sleep.preserved;
  derived_released_ = options.level > 0;
  sleeping_tags_ = options.level > 0 ? sleep.tags : std::vector<std::string>{};
  workers_ = std::move(sleep.captured.state.workers);
  set_state(State::kAsleep);
  const std::lock_guard lock(state_mutex_);
  public_.level = options.level;
  public_.checkpoint = sleep.report.checkpoint;
  return std::move(sleep.report);
}

Result<SleepReport> SleepController::checkpoint(const Value& outputs) {
  const std::unique_lock busy(operation_mutex_, std::try_to_lock);
  if (!busy.owns_lock()) {
    return Error{.code = Code::kUnavailable,
                 .what = fmt::format("the engine is {}", state().engine),
                 .next_step = "wait for that to end"};
  }
  const SleepOptions options{.preserve_state = true, .to_disk = true, .store_weights = false, .outputs = outputs};
  TORPOR_TRY(check(options));
  TORPOR_TRY(may_begin());
  if (is_sleeping())
    return Error{.code = Code::kFailedPrecondition,
                 .what = "the engine is asleep",
                 .next_step = "wake it first, or let it sleep to disk"};
  Operation operation("checkpoint", clock_, sink_, [this] { return lost(); });
  set_state(State::kFallingAsleep);
  FallingAsleep sleep{.options = options, .operation = operation, .preserved = true};
  sleep.report.to = "disk";
  sleep.report.preserve_state = true;
  const Status written = [&]() -> Status {
    TORPOR_TRY(admit(sleep));
    TORPOR_TRY(quiesce(sleep));
    TORPOR_TRY(prepare(sleep));
    TORPOR_TRY(save(sleep));
    return prove(sleep);
  }();
  if (!written) {
    operation.undo();
    if (!lost()) set_state(State::kAwake);
    Error error = written.error();
    error.state_changed = lost();
    return error.within("checkpoint");
  }
  operation.keep();
  ranks_.undo("cancel_save", {.tags = sleep.save.tags});  // the memory was only read
  sleep.report.kept_blocks = static_cast<int64_t>(sleep.live.kept.size());
  sleep.report.changed = true;
  sleep.report.fully_awake = true;
  if (const Status resumed = hooks_.resume(); !resumed) {
    lose(resumed.error());
    return resumed.error();
  }
  set_state(State::kAwake);
  operation.fill(sleep.report);
  return std::move(sleep.report);
}

// Refuses what cannot be done, before anything is touched.
Status SleepController::admit(FallingAsleep& sleep) {
  const SleepOptions& options = sleep.options;
  TORPOR_ASSIGN(sleep.described, ranks_.call("describe", {}));
  TORPOR_ASSIGN(sleep.tags, select_tags(options.tags, sleep.described.front().ledger));
  if (options.preserve_state && options.to_disk && !has_tag(sleep.tags, kKvCacheTag)) {
    return Error{.code = Code::kInvalidArgument,
                 .what = "a checkpoint of running requests needs their KV",
                 .next_step = "add \"kv_cache\" to tags"};
  }
  for (const std::string& tag : sleep.tags) {
    const bool weights_go = tag == kWeightsTag && ((options.level == 2 && !options.preserve_state) ||
                                                   (options.to_disk && !options.store_weights));
    const bool kv_goes = tag == kKvCacheTag && !options.preserve_state;
    if (!weights_go && !kv_goes) sleep.save.tags.push_back(tag);
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
  TORPOR_TRY(hooks_.quiesce(sleep.options.timeout_seconds));
  sleep.operation.undo_with([this] {
    if (const Status resumed = hooks_.resume(); !resumed) lose(resumed.error());
  });
  TORPOR_ASSIGN(sleep.report.requests, hooks_.unfinished_requests());
  sleep.operation.end("quiesce");
  return ok();
}

// The state as values and, to disk, that part of the checkpoint: durable before memory is touched.
Status SleepController::prepare(FallingAsleep& sleep) {
  const SleepOptions& options = sleep.options;
  if (!options.preserve_state && !options.to_disk) return ok();
  sleep.operation.begin("capture");
  TORPOR_ASSIGN(sleep.captured.state, hooks_.capture());
  if (!options.preserve_state) sleep.captured.state = without_requests(std::move(sleep.captured.state));
  TORPOR_TRY(sleep.captured.state.validate());
  sleep.captured.outputs = options.outputs;
  const uint64_t bytes_per_block = sleep.described.front().bytes_per_block;
  sleep.live = select_live_blocks(sleep.captured.state.kv, bytes_per_block, options_.kv_budget_bytes);
  drop_hashes(sleep.captured.state.kv, sleep.live.dropped);
  sleep.save.blocks = sleep.live.kept;
  if (options.to_disk) {
    TORPOR_ASSIGN(sleep.captured.fingerprint, fingerprint());
  }
  sleep.operation.end("capture");
  if (!options.to_disk) return ok();

  sleep.operation.begin("commit");
  uint64_t expected = sleep.live.kept.size() * bytes_per_block * sleep.described.size();
  for (const std::string& tag : sleep.save.tags) {
    if (tag != kKvCacheTag) expected += tag_bytes(sleep.described, tag, &RankLedger::Tag::region_bytes);
  }
  TORPOR_ASSIGN(sleep.checkpoints, manager(options_.directory));
  TORPOR_ASSIGN(sleep.pending, sleep.checkpoints->begin(expected));
  TORPOR_TRY(sleep.pending->write_state(sleep.captured));
  sleep.save.directory = sleep.pending->staging_path();
  sleep.save.writing = sleep.pending->writing();
  sleep.operation.end("commit");
  return ok();
}

// on_save_error="discard": the sleep goes on without the state, to host.
void SleepController::discard(FallingAsleep& sleep, const Error& why) {
  log().error("sleeping without the state: {}", why.to_string());
  sleep.pending.reset();
  sleep.preserved = false;
  sleep.report.note = fmt::format("the state was discarded: {}", why.to_string());
  sleep.report.to = "host";
  sleep.save.directory.clear();
  sleep.save.writing = {};
  sleep.save.blocks.clear();
  std::erase(sleep.save.tags, kKvCacheTag);
  if (!sleep.options.store_weights && has_tag(sleep.tags, kWeightsTag))
    sleep.save.tags.insert(sleep.save.tags.begin(), kWeightsTag);
}

// Copies what is kept to the arena or into the checkpoint under construction.
Status SleepController::save(FallingAsleep& sleep) {
  sleep.operation.begin("save");
  Result<std::vector<RankReply>> saved = ranks_.call("save", sleep.save);
  sleep.operation.undo_with([this, tags = sleep.save.tags] { ranks_.undo("cancel_save", {.tags = tags}); });
  if (!saved) return saved.error();
  for (const RankReply& reply : *saved) {
    if (!sleep.pending) break;
    for (const SavedChunk& chunk : reply.chunks.chunks)
      sleep.report.checkpoint_parts[chunk.key.tag] += chunk.stored_bytes;
    sleep.pending->add_rank(reply.chunks);
  }
  sleep.report.saved_bytes = total_bytes(*saved);
  sleep.operation.end("save", sleep.report.saved_bytes);
  return ok();
}

// Every chunk has its digest by now; to disk, the checkpoint becomes visible and durable.
Status SleepController::prove(FallingAsleep& sleep) {
  sleep.operation.begin("prove");
  if (sleep.pending) {
    SleepReport& report = sleep.report;
    TORPOR_ASSIGN(report.checkpoint, sleep.pending->commit());
    TORPOR_ASSIGN(const Checkpoint committed,
                  open_checkpoint(file_system_, report.checkpoint, options_.checkpoints.key));
    report.checkpoint_bytes = committed.manifest().total_bytes();
    for (const SectionInfo& section : committed.manifest().sections)
      report.checkpoint_parts[section.name] = section.stored_bytes;
    sleep.pending.reset();  // gives the lock back
    sleep.operation.undo_with([checkpoints = sleep.checkpoints, generation = committed.manifest().generation] {
      if (const Status removed = checkpoints->remove(generation); !removed)
        log().error("{}", removed.error().to_string());
    });
    TORPOR_TRY(ranks_.call("moved", {.directory = report.checkpoint}));
  }
  sleep.operation.end("prove");
  return ok();
}

Status SleepController::detach(FallingAsleep& sleep) {
  sleep.operation.begin("detach");
  TORPOR_TRY(hooks_.release_derived());
  sleep.operation.undo_with([this] {
    if (const Status rebuilt = hooks_.rebuild_derived(); !rebuilt) lose(rebuilt.error());
  });
  Result<std::vector<RankReply>> detached = ranks_.call("detach", {.tags = sleep.tags});
  if (!detached) {
    if (const Status undone = undo_detach(sleep.tags); !undone) lose(undone.error());
    return detached.error();
  }
  SleepReport& report = sleep.report;
  report.freed_bytes = total_bytes(*detached);
  report.ledgers = ledgers_of(*detached);
  remember(*detached);
  sleep.operation.end("detach", report.freed_bytes);

  report.dropped_blocks = static_cast<int64_t>(sleep.live.dropped.size());
  if (!sleep.preserved) return ok();
  report.kept_blocks = static_cast<int64_t>(sleep.live.kept.size());
  if (sleep.live.dropped.empty()) return ok();
  const Status dropped = hooks_.drop_prefix(sleep.live.dropped);
  if (!dropped) lose(dropped.error());  // the memory is gone: hashes of bytes that no longer exist would be hit
  return dropped;
}

// After a detach that failed on some rank: bring the others back from their backups.
Status SleepController::undo_detach(const std::vector<std::string>& tags) {
  ranks_.undo("attach", {.tags = tags});
  const std::vector<RankReply> restored = ranks_.undo("restore", {.tags = tags});
  for (const RankReply& reply : restored) {
    if (!reply.error && has_tag(reply.without_content, kWeightsTag)) {
      return Error{.code = Code::kDevice,
                   .what = "the weights of a rank are gone, those of another are not",
                   .next_step = "start a new engine",
                   .origin = Origin::kDevice};
    }
  }
  ranks_.undo("finish", {.tags = tags});
  ranks_.undo("cancel_save", {.tags = tags});
  TORPOR_ASSIGN(const std::vector<RankReply> described, ranks_.call("describe", {}));
  remember(described);
  for (const RankReply& reply : described) {
    for (const auto& [tag, entry] : reply.ledger.tags) {
      if (entry.state != "attached" && entry.state != "saving") {
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
