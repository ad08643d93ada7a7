#include "engine/sleep_controller.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/log.h"

namespace torpor {
namespace {

bool contains(const std::vector<std::string>& list, std::string_view item) { return std::find(list.begin(), list.end(), item) != list.end(); }

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

uint64_t tag_bytes(const std::vector<RankReply>& replies, const std::string& tag, uint64_t RankLedger::Tag::*field) {
  uint64_t sum = 0;
  for (const RankReply& reply : replies) {
    if (const auto found = reply.ledger.tags.find(tag); found != reply.ledger.tags.end()) sum += found->second.*field;
  }
  return sum;
}

std::vector<RankLedger> ledgers_of(const std::vector<RankReply>& replies) {
  std::vector<RankLedger> ledgers;
  for (const RankReply& reply : replies) ledgers.push_back(reply.ledger);
  return ledgers;
}

}  // namespace

// One sleep or wake: its phases with their clock, and the steps that undo it, in reverse, unless it is kept.
class SleepController::Operation {
 public:
  Operation(SleepController& controller, std::string_view name)
      : controller_(controller), name_(name), began_(controller.clock_.now()), last_(began_) {}
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  void undo_with(std::function<void()> step) { undo_.push_back(std::move(step)); }
  // Stops once the engine is lost: what is left to undo would touch memory that is not there, or take away the checkpoint
  // that the requests can still be woken from.
  void undo() {
    for (auto step = undo_.rbegin(); step != undo_.rend() && !controller_.lost(); ++step) (*step)();
    undo_.clear();
  }
  void keep() { undo_.clear(); }

  void begin(std::string_view phase) {
    last_ = controller_.clock_.now();
    if (controller_.sink_ != nullptr) controller_.sink_->on_phase({.operation = name_, .phase = phase});
  }
  void end(std::string_view phase, uint64_t bytes = 0) {
    const double seconds = seconds_between(last_, controller_.clock_.now());
    phases_.push_back({std::string(phase), seconds, bytes});
    if (controller_.sink_ != nullptr) {
      controller_.sink_->on_phase({.operation = name_, .phase = phase, .finished = true, .seconds = seconds, .bytes = bytes});
    }
  }
  void fill(SleepReport& report) {
    report.phases = std::move(phases_);
    report.seconds = seconds_between(began_, controller_.clock_.now());
  }

 private:
  SleepController& controller_;
  std::string_view name_;
  std::chrono::nanoseconds began_;
  std::chrono::nanoseconds last_;
  std::vector<Phase> phases_;
  std::vector<std::function<void()>> undo_;
};

struct SleepController::Captured {
  EngineCheckpoint checkpoint;
  LiveBlocks live;
};

SleepController::SleepController(EngineHooks& hooks, FileSystem& file_system, const Clock& clock, SleepControllerOptions options, EventSink* sink)
    : hooks_(hooks), file_system_(file_system), clock_(clock), options_(std::move(options)), sink_(sink), ranks_(hooks) {
  public_.engine = "awake";
}

void SleepController::set_state(State state) {
  const std::lock_guard lock(state_mutex_);
  state_ = state;
  switch (state) {
    case State::kAwake: public_.engine = "awake"; break;
    case State::kFallingAsleep: public_.engine = "falling asleep"; break;
    case State::kAsleep: public_.engine = "asleep"; break;
    case State::kWaking: public_.engine = "waking"; break;
    case State::kLost: public_.engine = "lost"; break;
  }
}

bool SleepController::lost() const {
  const std::lock_guard lock(state_mutex_);
  return state_ == State::kLost;
}

void SleepController::lose(const Error& error) {
  log().critical("the engine is lost: {}", error.to_string());
  set_state(State::kLost);
}

void SleepController::remember(const std::vector<RankReply>& replies) {
  const std::lock_guard lock(state_mutex_);
  public_.tags.clear();
  for (const RankReply& reply : replies) {
    for (const auto& [tag, entry] : reply.ledger.tags) {
      const auto [known, fresh] = public_.tags.try_emplace(tag, entry.state);
      if (!fresh && known->second != entry.state) known->second = entry.state == "broken" ? "broken" : known->second;
    }
  }
}

ControllerState SleepController::state() const {
  const std::lock_guard lock(state_mutex_);
  return public_;
}

bool SleepController::is_sleeping() const {
  const std::lock_guard lock(state_mutex_);
  return state_ != State::kAwake;
}

Status SleepController::check(const SleepOptions& options) const {
  const auto invalid = [](std::string what, std::string next) {
    return Error{.code = Code::kInvalidArgument, .what = std::move(what), .next_step = std::move(next)};
  };
  if (options.level < 0 || options.level > 2) return invalid(fmt::format("level is {}", options.level), "use 0, 1 or 2");
  if (options.in_flight != "freeze" && options.in_flight != "abort" && options.in_flight != "recompute") {
    return invalid(fmt::format("in_flight is \"{}\"", options.in_flight), "use \"freeze\", \"abort\" or \"recompute\"");
  }
  if (options.preserve_state != (options.in_flight == "freeze") && options.level > 0) {
    return invalid(fmt::format("preserve_state is {} and in_flight is \"{}\"", options.preserve_state, options.in_flight),
                   "\"freeze\" goes with preserve_state, \"abort\" and \"recompute\" go without");
  }
  if (options.to_disk && options.level == 0) return invalid("level 0 keeps all memory, there is nothing to write to disk", "use level 1 or 2");
  if (options.to_disk && options_.directory.empty()) {
    return invalid("no directory for checkpoints is configured", "set the option dir (or TORPOR_DIR) and start the engine again");
  }
  if (options.timeout_seconds && !(*options.timeout_seconds >= 0)) return invalid(fmt::format("timeout is {} s", *options.timeout_seconds), "use 0 or more, or none");
  return ok();
}

Result<std::vector<std::string>> SleepController::select_tags(const std::vector<std::string>& wanted, const RankLedger& ledger) const {
  std::vector<std::string> selected;
  for (const auto& [tag, entry] : ledger.tags) {
    if (wanted.empty() || contains(wanted, tag)) selected.push_back(tag);
  }
  for (const std::string& tag : wanted) {
    if (contains(selected, tag)) continue;
    std::vector<std::string> known;
    for (const auto& [name, entry] : ledger.tags) known.push_back(name);
    return Error{.code = Code::kInvalidArgument, .what = fmt::format("there is no tag \"{}\"", tag), .next_step = fmt::format("use some of: {}", fmt::join(known, ", "))};
  }
  // Weights first, the KV cache last: a wake that fails for want of memory then fails with less to undo.
  std::stable_sort(selected.begin(), selected.end(), [](const std::string& a, const std::string& b) {
    const auto order = [](const std::string& tag) { return tag == kWeightsTag ? 0 : tag == kKvCacheTag ? 2 : 1; };
    return order(a) < order(b);
  });
  return selected;
}

Result<std::unique_ptr<CheckpointManager>> SleepController::manager(const std::string& directory) const {
  return CheckpointManager::open(file_system_, directory, {.keep = options_.keep_checkpoints, .clock = &clock_});
}

Result<Fingerprint> SleepController::fingerprint() {
  TORPOR_ASSIGN(Fingerprint fields, hooks_.fingerprint());
  TORPOR_ASSIGN(const std::vector<RankReply> described, ranks_.call("describe", {}));
  fields["ranks"] = std::to_string(described.size());
  if (described.front().ledger.tags.contains(kWeightsTag)) {
    TORPOR_ASSIGN(const std::vector<RankReply> replies, ranks_.call("digest", {.tags = {kWeightsTag}}));
    for (size_t rank = 0; rank < replies.size(); ++rank) {
      fields[fmt::format("weights_digest_rank{}", rank)] = replies[rank].digests.at(kWeightsTag);
    }
  }
  return fields;
}

Result<SleepController::Captured> SleepController::capture(const SleepOptions& options, Operation& operation) {
  operation.begin("capture");
  Captured captured;
  TORPOR_ASSIGN(captured.checkpoint.state, hooks_.capture());
  if (!options.preserve_state) captured.checkpoint.state = without_requests(std::move(captured.checkpoint.state));
  TORPOR_TRY(captured.checkpoint.state.validate());
  captured.checkpoint.outputs = options.outputs;
  TORPOR_ASSIGN(const std::vector<RankReply> described, ranks_.call("describe", {}));
  captured.live = select_live_blocks(captured.checkpoint.state.kv, described.front().bytes_per_block, options_.kv_budget_bytes);
  drop_hashes(captured.checkpoint.state.kv, captured.live.dropped);
  if (options.to_disk) {
    TORPOR_ASSIGN(captured.checkpoint.fingerprint, fingerprint());
  }
  operation.end("capture");
  return captured;
}

Result<SleepReport> SleepController::sleep(const SleepOptions& options) {
  const std::unique_lock busy(operation_mutex_, std::try_to_lock);
  if (!busy.owns_lock()) {
    return Error{.code = Code::kUnavailable, .what = fmt::format("the engine is {}", state().engine), .next_step = "wait for that to end"};
  }
  TORPOR_TRY(check(options));
  State before;
  {
    const std::lock_guard lock(state_mutex_);
    before = state_;
  }
  if (before == State::kLost) {
    return Error{.code = Code::kFailedPrecondition, .what = "the engine is lost", .next_step = "start a new one and wake it from its last checkpoint"};
  }
  if (held_) return Error{.code = Code::kFailedPrecondition, .what = "a restored checkpoint waits for its front end", .next_step = "end the wake first"};
  if (before == State::kAsleep) {
    log().warn("sleep: the engine is already asleep");
    SleepReport report;
    report.note = "already asleep";
    report.level = state().level;
    return report;
  }
  Operation operation(*this, "sleep");
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
  SleepReport report;
  report.level = options.level;
  report.preserve_state = options.preserve_state;
  report.to = options.to_disk ? "disk" : "host";

  TORPOR_ASSIGN(const std::vector<RankReply> described, ranks_.call("describe", {}));
  TORPOR_ASSIGN(const std::vector<std::string> tags, select_tags(options.tags, described.front().ledger));
  const auto commit_sleep = [&](const std::vector<std::string>& asleep, std::vector<WorkerSnapshot> workers) {
    sleeping_tags_ = asleep;
    workers_ = std::move(workers);
    preserved_ = options.preserve_state;
    set_state(State::kAsleep);
    const std::lock_guard lock(state_mutex_);
    public_.level = options.level;
    public_.checkpoint = report.checkpoint;
  };

  if (options.preserve_state && options.level > 0) {
    TORPOR_ASSIGN(const std::vector<std::string> unsupported, hooks_.unsupported());
    if (!unsupported.empty()) {
      return Error{.code = Code::kUnsupported,
                   .what = fmt::format("the state of this engine cannot be preserved yet: {}", fmt::join(unsupported, "; ")),
                   .next_step = "sleep with preserve_state=False, or without these features"};
    }
  }
  operation.begin("quiesce");
  TORPOR_TRY(hooks_.quiesce(options.timeout_seconds));
  operation.undo_with([this] {
    if (const Status resumed = hooks_.resume(); !resumed) lose(resumed.error());
  });
  operation.end("quiesce");
  TORPOR_ASSIGN(report.requests, hooks_.unfinished_requests());
  if (options.level == 0) {
    report.changed = true;
    commit_sleep({}, {});
    return report;
  }

  const bool has_kv = contains(tags, kKvCacheTag);
  if (options.preserve_state && options.to_disk && !has_kv) {
    return Error{.code = Code::kInvalidArgument, .what = "a checkpoint of running requests needs their KV", .next_step = "add \"kv_cache\" to tags"};
  }
  std::vector<std::string> saved_tags;
  for (const std::string& tag : tags) {
    const bool weights_go = tag == kWeightsTag && ((options.level == 2 && !options.preserve_state) || (options.to_disk && !options.store_weights));
    const bool kv_goes = tag == kKvCacheTag && !options.preserve_state;
    if (!weights_go && !kv_goes) saved_tags.push_back(tag);
  }

  Captured captured;
  std::optional<PendingCheckpoint> pending;
  std::shared_ptr<CheckpointManager> checkpoints;  // shared with the step that undoes the commit
  RankOrder save{.tags = saved_tags};
  bool preserved = options.preserve_state;
  const auto prepare = [&]() -> Status {  // capture, and the part of the checkpoint that is durable before memory is touched
    if (!options.preserve_state && !options.to_disk) return ok();
    TORPOR_ASSIGN(captured, capture(options, operation));
    save.blocks = captured.live.kept;
    if (!options.to_disk) return ok();
    operation.begin("commit");
    uint64_t expected = captured.live.kept.size() * described.front().bytes_per_block * described.size();
    for (const std::string& tag : saved_tags) {
      if (tag != kKvCacheTag) expected += tag_bytes(described, tag, &RankLedger::Tag::region_bytes);
    }
    TORPOR_ASSIGN(checkpoints, manager(options_.directory));
    TORPOR_ASSIGN(pending, checkpoints->begin(expected));
    TORPOR_TRY(pending->write_state(captured.checkpoint));
    save.directory = pending->staging_path();
    operation.end("commit");
    return ok();
  };
  if (Status prepared = prepare(); !prepared) {
    pending.reset();
    if (!options.discard_on_save_error) return prepared.error();
    log().error("sleeping without the state: {}", prepared.error().to_string());
    report.note = fmt::format("the state was discarded: {}", prepared.error().to_string());
    report.to = "host";
    preserved = false;
    save.directory.clear();
    save.blocks.clear();
    std::erase(save.tags, kKvCacheTag);
    if (!options.store_weights && contains(tags, kWeightsTag)) save.tags.insert(save.tags.begin(), kWeightsTag);
  }

  operation.begin("save");
  {
    Result<std::vector<RankReply>> saved = ranks_.call("save", save);
    operation.undo_with([this, tags = save.tags] { ranks_.undo("cancel_save", {.tags = tags}); });
    if (!saved) return saved.error();
    report.saved_bytes = total_bytes(*saved);
    operation.end("save", report.saved_bytes);
    operation.begin("prove");
    if (pending) {
      for (const RankReply& reply : *saved) {
        for (const SavedChunk& chunk : reply.chunks.chunks) report.checkpoint_parts[chunk.key.tag] += chunk.stored_bytes;
        pending->add_rank(reply.chunks);
      }
      TORPOR_ASSIGN(report.checkpoint, pending->commit());
      TORPOR_ASSIGN(const Checkpoint committed, open_checkpoint(file_system_, report.checkpoint));
      report.checkpoint_bytes = committed.manifest().total_bytes();
      for (const SectionInfo& section : committed.manifest().sections) report.checkpoint_parts[section.name] = section.stored_bytes;
      pending.reset();  // gives the lock back
      operation.undo_with([checkpoints, generation = committed.manifest().generation] {
        if (const Status removed = checkpoints->remove(generation); !removed) log().error("{}", removed.error().to_string());
      });
      TORPOR_TRY(ranks_.call("moved", {.directory = report.checkpoint}));
    }
    operation.end("prove");
  }

  // Requests are dropped last, when nothing but the release of memory is left to fail.
  if (!preserved) TORPOR_TRY(hooks_.drop_requests(options.in_flight == "freeze" ? "abort" : options.in_flight));

  operation.begin("detach");
  TORPOR_TRY(hooks_.release_derived());
  operation.undo_with([this] {
    if (const Status rebuilt = hooks_.rebuild_derived(); !rebuilt) lose(rebuilt.error());
  });
  Result<std::vector<RankReply>> detached = ranks_.call("detach", {.tags = tags});
  if (!detached) {
    if (const Status undone = undo_detach(tags); !undone) lose(undone.error());
    return detached.error();
  }
  report.freed_bytes = total_bytes(*detached);
  operation.end("detach", report.freed_bytes);

  if (preserved && !captured.live.dropped.empty()) {
    // Memory is gone already: a failure here would leave hashes of bytes that no longer exist.
    if (const Status dropped = hooks_.drop_prefix(captured.live.dropped); !dropped) {
      lose(dropped.error());
      return dropped.error();
    }
  }
  report.kept_blocks = preserved ? static_cast<int64_t>(captured.live.kept.size()) : 0;
  report.dropped_blocks = static_cast<int64_t>(captured.live.dropped.size());
  report.preserve_state = preserved;
  report.changed = true;
  report.ledgers = ledgers_of(*detached);
  remember(*detached);
  derived_released_ = true;
  commit_sleep(tags, std::move(captured.checkpoint.state.workers));
  preserved_ = preserved;
  return report;
}

// After a detach that failed on some rank: bring the others back from their backups.
Status SleepController::undo_detach(const std::vector<std::string>& tags) {
  ranks_.undo("attach", {.tags = tags});
  const std::vector<RankReply> restored = ranks_.undo("restore", {.tags = tags});
  for (const RankReply& reply : restored) {
    if (!reply.error && contains(reply.without_content, kWeightsTag)) {
      return Error{.code = Code::kDevice, .what = "the weights of a rank are gone, those of another are not", .next_step = "start a new engine", .origin = Origin::kDevice};
    }
  }
  ranks_.undo("finish", {.tags = tags});
  ranks_.undo("cancel_save", {.tags = tags});
  TORPOR_ASSIGN(const std::vector<RankReply> described, ranks_.call("describe", {}));
  remember(described);
  for (const RankReply& reply : described) {
    for (const auto& [tag, entry] : reply.ledger.tags) {
      if (entry.state != "attached" && entry.state != "saving") {
        return Error{.code = Code::kDevice, .what = fmt::format("the tag {} is {}", tag, entry.state), .next_step = "start a new engine and wake it from its last checkpoint", .origin = Origin::kDevice};
      }
    }
  }
  return ok();
}

Result<SleepReport> SleepController::wake_up(const WakeOptions& options) {
  const std::unique_lock busy(operation_mutex_, std::try_to_lock);
  if (!busy.owns_lock()) {
    return Error{.code = Code::kUnavailable, .what = fmt::format("the engine is {}", state().engine), .next_step = "wait for that to end"};
  }
  State before;
  {
    const std::lock_guard lock(state_mutex_);
    before = state_;
  }
  if (before == State::kLost) {
    return Error{.code = Code::kFailedPrecondition, .what = "the engine is lost", .next_step = "start a new one and wake it from its last checkpoint"};
  }
  if (before == State::kAwake && options.from_checkpoint.empty()) {
    log().warn("wake_up: the engine is already awake");
    SleepReport report;
    report.note = "already awake";
    report.fully_awake = true;
    return report;
  }
  if (before == State::kAsleep && !options.from_checkpoint.empty()) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = "this engine is asleep with a state of its own",
                 .next_step = "wake it without from_checkpoint, or wake the checkpoint in a new engine"};
  }
  Operation operation(*this, "wake");
  set_state(State::kWaking);
  Result<SleepReport> report = before == State::kAsleep ? wake_same_process(options, operation) : wake_from_checkpoint(options, operation);
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
    if (contains(tags, tag) || tag == "scheduling") continue;
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("the tag \"{}\" is not asleep", tag),
                 .next_step = fmt::format("use some of: {}", fmt::join(tags, ", "))};
  }
  if (!options.tags.empty()) std::erase_if(tags, [&](const std::string& tag) { return !contains(options.tags, tag); });
  const bool last = tags.size() == sleeping_tags_.size();

  if (!tags.empty()) {
    operation.begin("attach");
    Result<std::vector<RankReply>> attached = ranks_.call("attach", {.tags = tags});
    operation.undo_with([this, tags] { ranks_.undo("cancel_restore", {.tags = tags}); });
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
    std::erase_if(sleeping_tags_, [&](const std::string& tag) { return contains(tags, tag); });
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
      TORPOR_ASSIGN(const Checkpoint checkpoint, open_checkpoint(file_system_, slept_to));
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
    TORPOR_ASSIGN(const Checkpoint checkpoint, open_checkpoint(file_system_, options.from_checkpoint));
    TORPOR_ASSIGN(const EngineCheckpoint state, checkpoint.read_state());
    TORPOR_TRY(state.state.validate());
    TORPOR_ASSIGN(const Fingerprint engine, fingerprint());
    TORPOR_TRY(compare_fingerprints(state.fingerprint, engine));
    report.checkpoint = checkpoint.path();
    report.checkpoint_bytes = checkpoint.manifest().total_bytes();
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
    TORPOR_ASSIGN(const std::vector<RankReply> loaded, ranks_.call("load_blocks", {.directory = checkpoint.path(), .chunks = checkpoint.manifest().ranks}));
    report.restored_bytes = total_bytes(loaded);
    report.ledgers = ledgers_of(loaded);
    remember(loaded);
    operation.end("restore", report.restored_bytes);

    operation.begin("reconnect");
    operation.undo_with([this] {
      if (const Status forgotten = hooks_.forget_restored(); !forgotten) lose(forgotten.error());
    });
    TORPOR_ASSIGN(report.failed_requests, hooks_.restore(state));
    report.requests = static_cast<int64_t>(state.state.scheduler.requests.size() - report.failed_requests.size());
    report.kept_blocks = static_cast<int64_t>(state.state.kv.blocks.size());
    report.outputs = state.outputs;
    operation.end("reconnect");
    const Status retained = [&]() -> Status {
      const size_t name_at = checkpoint.path().rfind('/');
      TORPOR_ASSIGN(const std::unique_ptr<CheckpointManager> checkpoints, manager(checkpoint.path().substr(0, name_at)));
      return checkpoints->woken_from(checkpoint.manifest().generation);
    }();
    if (!retained) log().warn("older checkpoints were not removed: {}", retained.error().to_string());
    return ok();
  };
  if (Status restored = restore(); !restored) {
    if (!options.discard_on_restore_error) return restored.error();
    operation.undo();
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

Status SleepController::end_hold(bool keep) {
  const std::lock_guard busy(operation_mutex_);
  if (!held_) return Error{.code = Code::kFailedPrecondition, .what = "nothing is held", .next_step = "wake with hold first"};
  held_ = false;
  if (!keep) TORPOR_TRY(hooks_.forget_restored());
  set_state(State::kAwake);
  return hooks_.resume();
}

Result<SleepPlan> SleepController::plan_sleep(const SleepOptions& options) {
  const std::unique_lock busy(operation_mutex_, std::try_to_lock);
  if (!busy.owns_lock()) {
    return Error{.code = Code::kUnavailable, .what = fmt::format("the engine is {}", state().engine), .next_step = "wait for that to end"};
  }
  SleepPlan plan;
  if (const Status valid = check(options); !valid) plan.problems.push_back(valid.error().to_string());
  if (is_sleeping()) plan.problems.push_back(fmt::format("the engine is {}", state().engine));
  if (options.preserve_state) {
    TORPOR_ASSIGN(const std::vector<std::string> unsupported, hooks_.unsupported());
    for (const std::string& feature : unsupported) plan.problems.push_back(fmt::format("cannot be preserved: {}", feature));
  }
  if (!plan.problems.empty()) return plan;
  TORPOR_ASSIGN(const std::vector<RankReply> described, ranks_.call("describe", {}));
  TORPOR_ASSIGN(const std::vector<std::string> tags, select_tags(options.tags, described.front().ledger));
  TORPOR_ASSIGN(plan.requests, hooks_.unfinished_requests());
  if (options.level == 0) return plan;
  if (options.preserve_state) {
    TORPOR_ASSIGN(const SchedulerCheckpoint state, hooks_.capture());
    const LiveBlocks live = select_live_blocks(state.kv, described.front().bytes_per_block, options_.kv_budget_bytes);
    plan.kept_blocks = static_cast<int64_t>(live.kept.size());
    plan.dropped_blocks = static_cast<int64_t>(live.dropped.size());
  }
  for (const std::string& tag : tags) {
    plan.free_bytes[tag] = tag_bytes(described, tag, &RankLedger::Tag::physical_bytes);
    if (tag == kKvCacheTag) {
      plan.save_bytes[tag] = static_cast<uint64_t>(plan.kept_blocks) * described.front().bytes_per_block * described.size();
    } else if (tag != kWeightsTag || options.level == 1 || options.preserve_state) {
      plan.save_bytes[tag] = tag == kWeightsTag && options.to_disk && !options.store_weights ? 0 : tag_bytes(described, tag, &RankLedger::Tag::region_bytes);
    }
  }
  return plan;
}

Result<std::vector<RankLedger>> SleepController::ledgers() {
  TORPOR_ASSIGN(const std::vector<RankReply> described, ranks_.call("describe", {}));
  remember(described);
  return ledgers_of(described);
}

}  // namespace torpor
