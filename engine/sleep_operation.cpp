// SPDX-License-Identifier: Apache-2.0
#include "engine/sleep_operation.h"

#include <algorithm>
#include <thread>

#include <fmt/core.h>

#include "base/log.h"
#include "base/text.h"
#include "engine/sleep_planner.h"

namespace torpor {
namespace {

constexpr std::chrono::seconds kMemoryComes{30};
constexpr std::chrono::milliseconds kLookAgain{50};

// Return the state of the same engine without its requests.
CapturedState without_requests(CapturedState state) {
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

struct SleepOperation::Step {
  std::string_view phase;
  bool (SleepOperation::*wanted)() const;
  Result<uint64_t> (SleepOperation::*take)();
  Status (SleepOperation::*undo)();  // called also if the step failed half-way or did nothing
};

// The phases of a sleep. Their names are in recordings and metrics, so two old ones stay although they mislead:
//   commit  write_state(): writes the state into a checkpoint under construction. Nothing is committed: if the sleep
//           fails before "verify", the destructor of pending_ removes the checkpoint.
//   verify  verify(): to disk, writes the manifest and renames the checkpoint, which commits it. To host memory it does
//           nothing: "save" took the digest of each chunk.
const std::array<SleepOperation::Step, SleepOperation::kSteps> SleepOperation::steps_ = {{
    // phase     wanted                              take                          undo
    {"quiesce", &SleepOperation::always, &SleepOperation::quiesce, &SleepOperation::resume},
    {"capture", &SleepOperation::captures, &SleepOperation::capture, &SleepOperation::release_host_slots},
    {"commit", &SleepOperation::writes_checkpoint, &SleepOperation::write_state, &SleepOperation::left_to_pending},
    {"save", &SleepOperation::always, &SleepOperation::save, &SleepOperation::cancel_save},
    {"verify", &SleepOperation::always, &SleepOperation::verify, &SleepOperation::withdraw},
    {"detach", &SleepOperation::releases_memory, &SleepOperation::drop_derived, &SleepOperation::rebuild_derived},
    {"detach", &SleepOperation::releases_memory, &SleepOperation::detach, &SleepOperation::undo_detach},
}};

// Take the steps from `first` to `last` whose condition holds.
Status SleepOperation::take_steps(size_t first, size_t last) {
  for (size_t place = first; place <= last; ++place) {
    const Step& step = steps_[place];
    if (!(this->*step.wanted)()) continue;
    if (place == first || steps_[place - 1].phase != step.phase) {
      if (place != kQuiesce) TORPOR_RETURN_IF_ERROR(not_cancelled());
      operation_.begin(step.phase);
    }
    TORPOR_ASSIGN_OR_RETURN(const uint64_t bytes, take(step));
    if (place == last || steps_[place + 1].phase != step.phase) operation_.end(step.phase, bytes);
  }
  return ok();
}

// Register the undo step before the step begins.
Result<uint64_t> SleepOperation::take(const Step& step) {
  operation_.undo_with([this, &step] { return (this->*step.undo)(); });
  return (this->*step.take)();
}

SleepOperation::SleepOperation(OperationContext& context, std::string_view name, const SleepOptions& asked,
                               uint64_t part_of)
    : context_(context),
      engine_(context.engine),
      options_(asked),
      name_(name),
      deeper_(engine_.state.is(EngineState::At::kAsleep)),
      preserved_(asked.preserve_state),
      to_disk_(asked.to_disk),
      operation_(name, engine_.clock, engine_.port, engine_.state, asked.progress, part_of) {
  engine_.state.enter(EngineState::At::kFallingAsleep);
}

// --- the modes ---

Status SleepOperation::prepare_sleep() {
  report_.level = options_.level;
  report_.to = options_.to_disk ? "disk" : "host";
  TORPOR_RETURN_IF_ERROR(admit());
  TORPOR_RETURN_IF_ERROR(take_steps(kQuiesce, kQuiesce));
  while (options_.level > 0) {
    const size_t steps = operation_.steps();
    const Status saved = try_catch([&] { return take_steps(kCapture, kVerify); });
    if (saved) break;
    // Apart from the requests nothing may be discarded: level 1 promises to keep the weights.
    if (!options_.discard_on_save_error || (!to_disk_ && !preserved_)) return saved.error();
    if (operation_.cancelled()) return saved.error();
    operation_.undo_to(steps);
    if (engine_.state.unrecoverable()) return saved.error();
    fall_back(saved.error());
  }
  return ok();
}

Status SleepOperation::prepare_checkpoint() {
  report_.to = "disk";
  report_.preserve_state = true;
  TORPOR_RETURN_IF_ERROR(admit());
  return take_steps(kQuiesce, kVerify);
}

Status SleepOperation::prepare_swap_out() {
  report_.level = options_.level;
  report_.to = "host";
  TORPOR_RETURN_IF_ERROR(admit());
  TORPOR_RETURN_IF_ERROR(take_steps(kQuiesce, kCapture));
  TORPOR_RETURN_IF_ERROR(not_cancelled());
  TORPOR_RETURN_IF_ERROR(take(steps_[kDropDerived]));  // before its phase, as the save releases memory
  // The engine may have freed some of its memory: what is left is promised to the other engine.
  TORPOR_ASSIGN_OR_RETURN(described_, engine_.ranks.call(orders::Describe{}));
  engine_.state.set_tags(described_);
  return ok();
}

Status SleepOperation::save_for_swap(const std::string& path) {
  save_.channel = path;
  return take_steps(kSave, kSave);
}

Status SleepOperation::commit_sleep() {
  SleepInForce& asleep = context_.asleep;
  std::vector<std::string> sleeping = asleep.tags;
  if (options_.level > 0) sleeping.insert(sleeping.end(), tags_.begin(), tags_.end());
  sort_for_wake(sleeping);
  std::string checkpoint = report_.checkpoint;
  std::vector<uint64_t> writes = writes_of_weights(described_);
  // If the requests were captured by an earlier sleep, the generators are as they were then.
  const bool same_workers = deeper_ && asleep.preserved && preserved_;
  std::optional<EngineCheckpoints::Generation> generation;
  if (pending_)
    generation = {.directory = context_.checkpoints.directory_of(options_.data_parallel),
                  .number = pending_->generation()};
  Metadata metadata = report_.metadata;
  TORPOR_RETURN_IF_ERROR(not_cancelled());
  std::vector<std::string> weights = weights_of_kv();
  if (options_.level > 0) say_what_to_load();
  std::vector<std::string> without_content = report_.reload;
  without_content.insert(without_content.end(), asleep.without_content.begin(), asleep.without_content.end());
  TORPOR_RETURN_IF_ERROR(take_steps(save_.channel.empty() ? kDropDerived : kDetach, kDetach));
  // Nothing can fail from here on: the memory is released.
  operation_.commit();
  report_.changed = true;
  report_.preserve_state = preserved_;
  asleep.preserved = preserved_ && options_.level > 0;
  asleep.derived_released = options_.level > 0;
  asleep.tags = std::move(sleeping);
  if (has_tag(tags_, kKvCacheTag)) asleep.deferrable_blocks = std::move(deferrable_);
  if (!same_workers) asleep.workers = std::move(captured_.state.workers);
  if (!deeper_) asleep.weights_writes = std::move(writes);
  if (!deeper_ || !weights.empty()) asleep.weights_digests = std::move(weights);
  asleep.without_content = std::move(without_content);
  if (!deeper_ || generation) asleep.checkpoint_lock = std::move(checkpoint_lock_);
  if (!deeper_ || generation) asleep.checkpoint = std::move(generation);
  if (!deeper_ || !checkpoint.empty()) asleep.metadata = std::move(metadata);
  operation_.fill(report_);
  engine_.state.fall_asleep(options_.level, std::move(checkpoint));
  return ok();
}

Status SleepOperation::serve_on() {
  // The memory was only read.
  TORPOR_RETURN_IF_ERROR(engine_.ranks.undo(orders::Undo{.what = orders::Undo::What::kSave, .tags = save_.tags}));
  operation_.commit();
  if (Status resumed = engine_.hooks.resume(); !resumed) {
    engine_.state.mark_unrecoverable(resumed.error());
    return resumed;
  }
  engine_.state.enter(EngineState::At::kAwake);
  report_.kept_blocks = static_cast<int64_t>(live_.kept.size());
  report_.changed = true;
  report_.fully_awake = true;
  operation_.fill(report_);
  return ok();
}

void SleepOperation::retire_older() noexcept {
  if (pending_) pending_->retire_older();
}

Error SleepOperation::undone(Error error) noexcept {
  operation_.failed(error);
  operation_.undo();
  engine_.state.enter(deeper_ ? EngineState::At::kAsleep : EngineState::At::kAwake);
  const std::string_view irreversible = operation_.irreversible();
  error.state_changed = engine_.state.unrecoverable() || checkpoint_stays_ || !irreversible.empty();
  (void)try_catch([&]() -> Status {
    std::string what = fmt::format("{}: {}", name_, error.what);
    if (!irreversible.empty()) what += fmt::format("; {}", irreversible);
    if (checkpoint_stays_) {
      what += report_.checkpoint.empty() ? "; a checkpoint may be left behind"
                                         : fmt::format("; its checkpoint is {}", report_.checkpoint);
    }
    error.what = std::move(what);
    return ok();
  });
  return error;
}

// Save to host memory instead of disk, and drop requests that do not fit there (discard_on_save_error). Precondition:
// the failed save is undone.
void SleepOperation::fall_back(const Error& why) {
  const std::string what = to_disk_ ? "it is kept in host memory, not on disk" : "the state was discarded";
  log().error("sleep: {}: {}", what, why);
  if (!report_.note.empty()) report_.note += "; ";
  report_.note += fmt::format("{}: {}", what, why.to_string());
  if (std::exchange(checkpoint_stays_, false)) report_.note += "; a checkpoint may be left behind";
  if (std::exchange(to_disk_, false)) {
    report_.to = "host";
  } else {
    preserved_ = false;
    std::erase(save_.tags, kKvCacheTag);
  }
  checkpoint_lock_.reset();
  pending_.reset();
  captured_ = {};
  live_ = {};
  deferrable_.clear();
  save_.directory.clear();
  save_.writing = {};
  save_.blocks.clear();
  save_.versions.clear();
  save_.host_slots.clear();
  saved_weights_.clear();
  report_.checkpoint.clear();
  report_.metadata.clear();
  report_.checkpoint_bytes = 0;
  report_.checkpoint_parts.clear();
  report_.compacted_bytes = report_.reused_bytes = report_.disk_bytes = 0;
}

// --- the steps ---

// Refuse what is impossible, before anything changes.
Status SleepOperation::admit() {
  TORPOR_ASSIGN_OR_RETURN(described_, engine_.ranks.call(orders::Describe{}));
  engine_.state.set_tags(described_);
  TORPOR_ASSIGN_OR_RETURN(tags_, select_tags(options_.tags, described_));
  std::erase_if(tags_, [&](const std::string& tag) { return has_tag(context_.asleep.tags, tag); });
  if (options_.to_disk)
    TORPOR_RETURN_IF_ERROR(can_sleep_to_disk(context_, deeper_, options_.preserve_state, tags_, described_));
  save_.progress = options_.progress;
  for (const std::string& tag : tags_) {
    if (!options_.drops(tag)) save_.tags.push_back(tag);
    // Once a checkpoint has the weights, later ones link the file: no later sleep writes it again.
    if (tag == kWeightsTag && options_.weights == Weights::kReload) save_.carried.push_back(tag);
  }
  if (!options_.preserve_state || options_.level == 0) return ok();
  return engine_.can_preserve(name_ == "checkpoint" ? EngineParts::kNoCheckpoint
                                                    : "sleep with preserve_state=False, or without these features");
}

Status SleepOperation::quiesce_engine() { return take_steps(kQuiesce, kQuiesce); }

Result<uint64_t> SleepOperation::quiesce() {
  if (!deeper_) TORPOR_RETURN_IF_ERROR(engine_.hooks.quiesce(options_.timeout_seconds));
  TORPOR_ASSIGN_OR_RETURN(report_.requests, engine_.hooks.unfinished_requests());
  return 0;
}

Status SleepOperation::resume() { return deeper_ ? ok() : engine_.hooks.resume(); }

bool SleepOperation::captures() const {
  if (!preserved_ && !to_disk_) return false;
  // If this is a deeper sleep, the first one has captured the requests.
  return !deeper_ || !context_.asleep.preserved || has_tag(tags_, kKvCacheTag);
}

// Capture the state as values, and choose the KV blocks to save.
Result<uint64_t> SleepOperation::capture() {
  const bool with_kv = has_tag(tags_, kKvCacheTag);
  TORPOR_ASSIGN_OR_RETURN(captured_.state, engine_.hooks.capture());
  if (!preserved_) captured_.state = without_requests(std::move(captured_.state));
  TORPOR_RETURN_IF_ERROR(captured_.state.validate());
  captured_.outputs = options_.outputs;
  captured_.metadata = options_.metadata;
  if (with_kv)
    live_ = select_live_blocks(captured_.state.kv, block_bytes(described_).most, engine_.options.kv_budget_bytes);
  drop_hashes(captured_.state.kv, live_.dropped);
  name_blocks(save_, captured_.state, live_.kept);
  deferrable_ = deferred_blocks_of(captured_.state, save_.blocks, engine_.hooks.holds_back());
  // Blocks that the engine offloaded and has not changed since need no copy: the host store keeps them.
  if (with_kv && !to_disk_) {
    TORPOR_ASSIGN_OR_RETURN(save_.host_slots, engine_.hooks.host_slots(save_.blocks, /*keep=*/true));
  }
  if (to_disk_) {
    // Weights that are saved are read by the save, and not twice: save() adds their digest. Named ones are read once
    // more.
    WeightsDigest digest = engine_.options.always_read_weights ? WeightsDigest::kRead : WeightsDigest::kReadOrProven;
    if (has_tag(save_.tags, kWeightsTag)) digest = WeightsDigest::kNone;
    TORPOR_ASSIGN_OR_RETURN(captured_.fingerprint, fingerprint_of(engine_, described_, digest));
  }
  return 0;
}

Status SleepOperation::release_host_slots() {
  if (!to_disk_ && has_tag(tags_, kKvCacheTag)) engine_.release_host_slots();
  return ok();
}

// Write the state into a new checkpoint; it is durable before memory is touched.
Result<uint64_t> SleepOperation::write_state() {
  uint64_t expected = live_.kept.size() * block_bytes(described_).all;
  for (const std::string& tag : save_.tags) {
    if (tag != kKvCacheTag) expected += tag_bytes(described_, tag, &RankLedger::Tag::region_bytes);
  }
  const EngineCheckpoints& own = context_.checkpoints;
  TORPOR_ASSIGN_OR_RETURN(checkpoints_, own.open(own.directory_of(options_.data_parallel)));
  TORPOR_ASSIGN_OR_RETURN(pending_, checkpoints_->begin(expected));
  if (described_.size() > 1) TORPOR_RETURN_IF_ERROR(own.check_seen_by_all(*pending_));
  TORPOR_RETURN_IF_ERROR(pending_->write_state(captured_));
  save_.directory = pending_->staging_path();
  save_.writing = pending_->writing();
  save_.as_proven = !engine_.options.always_read_weights;
  return 0;
}

// Copy all that is saved to the arena or into the checkpoint under construction.
Result<uint64_t> SleepOperation::save() {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<orders::Save::Reply> saved, engine_.ranks.call(save_));
  if (pending_) {
    for (const orders::Save::Reply& reply : saved) {
      for (const auto& [tag, sums] : reply.saved.tags) report_.checkpoint_parts[tag] += sums.stored_bytes;
      pending_->add_rank(reply.saved);
    }
    if (has_tag(save_.tags, kWeightsTag)) {
      TORPOR_ASSIGN_OR_RETURN(const bool named, add_named_weights(engine_, captured_.fingerprint, save_.as_proven));
      if (!named) add_weights(captured_.fingerprint, saved);
    }
    pending_->set_fingerprint(captured_.fingerprint);
  }
  for (const orders::Save::Reply& reply : saved) {
    const auto weights = reply.digests.find(kWeightsTag);
    saved_weights_.push_back(weights == reply.digests.end() ? "" : weights->second);
    report_.compacted_bytes += reply.compacted_bytes;
    report_.reused_bytes += reply.reused_bytes;
    report_.disk_bytes += pending_ ? reply.bytes + reply.reused_bytes : reply.spilled_bytes;
  }
  report_.saved_bytes = total_bytes(saved);
  report_.host_bytes = report_.saved_bytes + report_.reused_bytes - report_.disk_bytes;
  return report_.saved_bytes;
}

// Precondition, in a swap: the other engine has none of the memory any more.
Status SleepOperation::cancel_save() {
  if (!save_.channel.empty()) {
    TORPOR_RETURN_IF_ERROR(retry_until_memory_comes(engine_.clock, memory_comes_late_, [&]() -> Status {
      TORPOR_RETURN_IF_ERROR(
          engine_.ranks.undo(orders::Undo{.what = orders::Undo::What::kReleasedPages, .tags = save_.tags}));
      return ok();
    }));
  }
  TORPOR_RETURN_IF_ERROR(engine_.ranks.undo(orders::Undo{.what = orders::Undo::What::kSave, .tags = save_.tags}));
  return ok();
}

// Every chunk has its digest now. To disk: make the checkpoint visible and durable.
Result<uint64_t> SleepOperation::verify() {
  if (!pending_) return 0;
  context_.checkpoints.name_owner(*pending_, captured_.fingerprint);
  checkpoint_stays_ = true;
  TORPOR_RETURN_IF_ERROR(context_.checkpoints.commit(*pending_, report_));
  report_.metadata = captured_.metadata;
  if (releases_memory()) {
    TORPOR_ASSIGN_OR_RETURN(checkpoint_lock_, pending_->hold_asleep());
  }
  TORPOR_RETURN_IF_ERROR(engine_.ranks.call(orders::Inform{.committed = report_.checkpoint}));
  return 0;
}

// If this fails, the error of the sleep says that the checkpoint exists.
Status SleepOperation::withdraw() {
  if (pending_ && pending_->withdraw()) checkpoint_stays_ = false;
  return ok();
}

// Drop what the engine derived from its memory, and requests and prefixes that are not saved. It comes after all other
// steps that can fail, except those that release memory: requests that it ends cannot be brought back.
Result<uint64_t> SleepOperation::drop_derived() {
  TORPOR_RETURN_IF_ERROR(engine_.hooks.release_derived());
  TORPOR_RETURN_IF_ERROR(drop());
  return 0;
}

Status SleepOperation::rebuild_derived() {
  return context_.asleep.derived_released ? ok() : engine_.hooks.rebuild_derived();
}

Status SleepOperation::drop() {
  if (!preserved_) {
    const bool recompute = options_.in_flight == "recompute";
    const bool any = report_.requests > 0;
    if (any) operation_.irreversible(recompute ? "its requests may be computed again" : "its requests may be ended");
    TORPOR_RETURN_IF_ERROR(engine_.hooks.drop_requests(recompute ? "recompute" : "abort"));
    context_.asleep.deferrable_blocks.clear();  // of an earlier sleep, also if this one is undone
    if (any) operation_.irreversible(recompute ? "its requests are computed again" : "its requests were ended");
    return ok();
  }
  // Hashes of bytes that are not kept must not be hit after the wake.
  return live_.dropped.empty() ? ok() : engine_.hooks.drop_prefix(live_.dropped);
}

Result<uint64_t> SleepOperation::detach() {
  report_.dropped_blocks = static_cast<int64_t>(live_.dropped.size());
  if (preserved_) report_.kept_blocks = static_cast<int64_t>(live_.kept.size());
  TORPOR_ASSIGN_OR_RETURN(const std::vector<orders::Detach::Reply> detached,
                          engine_.ranks.call(orders::Detach{.tags = tags_}));
  report_.freed_bytes = total_bytes(detached);
  report_.ledgers = ledgers_of(detached);
  engine_.state.set_tags(detached);
  return report_.freed_bytes;
}

// A detach may fail on some ranks: bring the others back from their backups.
Status SleepOperation::undo_detach() {
  const auto broken = [](std::string what, std::string next) {
    return Error{
        .code = Code::kDevice, .what = std::move(what), .next_step = std::move(next), .origin = Origin::kDevice};
  };
  TORPOR_ASSIGN_OR_RETURN(const std::vector<orders::Restore::Reply> restored,
                          engine_.ranks.undo(orders::Restore{.tags = tags_}));
  for (const orders::Restore::Reply& reply : restored) {
    if (has_tag(reply.without_content, kWeightsTag))
      return broken("the weights of a rank are gone, those of another are not", "start a new engine");
  }
  TORPOR_RETURN_IF_ERROR(engine_.ranks.undo(orders::Finish{.tags = tags_}));
  TORPOR_ASSIGN_OR_RETURN(const Described described, engine_.ranks.undo(orders::Describe{}));
  engine_.state.set_tags(described);
  for (const orders::Describe::Reply& reply : described) {
    for (const auto& [tag, entry] : reply.ledger.tags) {
      if (has_tag(tags_, tag) && entry.state != "attached" && entry.state != "saving")
        return broken(fmt::format("the tag {} is {}", tag, entry.state),
                      "start a new engine and wake it from its last checkpoint");
    }
  }
  return ok();
}

// --- what the wake will need to know ---

// Write into the report what the wake will not bring back.
void SleepOperation::say_what_to_load() {
  for (const std::string& tag : tags_) {
    if (tag != kKvCacheTag && !is_scratch(tag) && (options_.drops(tag) || is_without_content(described_, tag)))
      report_.reload.push_back(tag);
  }
  if (report_.reload.empty()) return;
  if (!report_.note.empty()) report_.note += "; ";
  report_.note += fmt::format("{} not kept: to be loaded after the wake", joined(report_.reload, ", "));
}

// Return, by rank, the digest of the weights that computed the KV of preserved requests; empty if it is not known.
// Weights that are released without a copy are read for it, unless the wake is expected to say what happens to the KV.
// A failure is logged; then the wake takes weights that are loaded again for other ones.
std::vector<std::string> SleepOperation::weights_of_kv() noexcept {
  std::vector<std::string> weights;
  const Status found = try_catch([&]() -> Status {
    const bool always_read = engine_.options.always_read_weights;
    if (!preserved_ && options_.level > 0) return ok();
    if (is_without_content(described_, kWeightsTag)) return ok();
    if (deeper_ && writes_of_weights(described_) != context_.asleep.weights_writes) return ok();
    std::vector<std::string> known = saved_weights_;
    known.resize(described_.size());
    for (size_t rank = 0; rank < known.size(); ++rank) {
      const auto proven = described_[rank].proven.find(kWeightsTag);
      if (!known[rank].empty() || proven == described_[rank].proven.end() || always_read) continue;
      known[rank] = proven->second;
    }
    if (!has_tag(known, "")) return weights = std::move(known), ok();
    const bool go = options_.level > 0 && has_tag(tags_, kWeightsTag) && options_.drops(kWeightsTag);
    if (!go || context_.wakes_name_old_kv || report_.requests == 0) return ok();
    // A checkpoint has just taken the digest.
    TORPOR_ASSIGN_OR_RETURN(
        std::vector<orders::DigestTags::Reply> digested,
        engine_.ranks.call(orders::DigestTags{.tags = {kWeightsTag}, .as_proven = to_disk_ || !always_read}));
    for (orders::DigestTags::Reply& reply : digested) weights.push_back(std::move(reply.digests.at(kWeightsTag)));
    return ok();
  });
  if (found) return weights;
  (void)try_catch([&]() -> Status {
    log().warn("sleep: it will not be noticed that the same weights are loaded again: {}", found.error());
    return ok();
  });
  return {};
}

std::vector<uint64_t> SleepOperation::bytes_by_rank() const {
  std::vector<uint64_t> by_rank;
  for (const orders::Describe::Reply& rank : described_) {
    uint64_t bytes = 0;
    for (const std::string& tag : tags_) {
      if (const auto found = rank.ledger.tags.find(tag); found != rank.ledger.tags.end())
        bytes += found->second.physical_bytes;
    }
    by_rank.push_back(bytes);
  }
  return by_rank;
}

Status retry_until_memory_comes(const Clock& clock, bool just_ended, const std::function<Status()>& attempt) {
  const std::chrono::nanoseconds began = clock.now();
  while (true) {
    const Status done = attempt();
    if (done || done.error().code != Code::kResourceExhausted || !just_ended) return done;
    if (clock.now() - began > kMemoryComes) return done;
    std::this_thread::sleep_for(kLookAgain);
  }
}

}  // namespace torpor
