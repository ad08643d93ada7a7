// SPDX-License-Identifier: Apache-2.0
#include "engine/sleep_controller.h"

#include <algorithm>

#include <fmt/core.h>

#include "base/log.h"
#include "base/text.h"
#include "checkpoint/checkpoint_set.h"
#include "checkpoint/store_names.h"

namespace torpor {

void SleepController::set_state(State state) noexcept {
  const MutexLock lock(state_mutex_);
  set_state_locked(state);
}

void SleepController::set_state_locked(State state) noexcept {
  const State before = std::exchange(state_, state);
  if (before == state) return;
  (void)port_.record(
      {.type = EventType::kEngine, .from = static_cast<uint8_t>(before), .to = static_cast<uint8_t>(state)});
}

bool SleepController::is_in(State state) const noexcept {
  const MutexLock lock(state_mutex_);
  return state_ == state;
}

bool SleepController::lost() const noexcept { return is_in(State::kLost); }

void SleepController::lose(const Error& error) noexcept {
  set_state(State::kLost);
  (void)catching([&]() -> Status {
    log().critical("the engine is unrecoverable: {}", error.to_string());
    return ok();
  });
}

// Takes no memory but for tags that were not known, so that what is recorded of the known ones is always right.
template <class Reply>
void SleepController::remember(const std::vector<Reply>& replies) noexcept {
  const MutexLock lock(state_mutex_);
  std::erase_if(public_.tags, [&](const auto& known) {
    return std::none_of(replies.begin(), replies.end(),
                        [&](const Reply& reply) { return reply.ledger.tags.contains(known.first); });
  });
  for (auto& [tag, state] : public_.tags) state.clear();
  (void)catching([&]() TORPOR_REQUIRES(state_mutex_) -> Status {
    for (const Reply& reply : replies) {
      for (const auto& [tag, entry] : reply.ledger.tags) {
        std::string& state = public_.tags[tag];
        if (state.empty() || entry.state == "broken") state = entry.state;  // short: kept without memory of its own
      }
    }
    return ok();
  });
}
template void SleepController::remember(const std::vector<orders::Describe::Reply>&) noexcept;
template void SleepController::remember(const std::vector<orders::Detach::Reply>&) noexcept;
template void SleepController::remember(const std::vector<orders::Finish::Reply>&) noexcept;
template void SleepController::remember(const std::vector<orders::LoadBlocks::Reply>&) noexcept;

// Of a checkpoint in a directory of checkpoints: one that was pulled may have another number there than where it was
// made.
std::optional<SleepController::RestoredFrom> SleepController::place_of(const std::string& path) {
  const size_t name = path.rfind('/') + 1;
  const std::optional<uint64_t> generation = generation_of(path.substr(name));
  if (!generation) return std::nullopt;
  return RestoredFrom{.directory = path.substr(0, name - 1), .generation = *generation};
}

ControllerState SleepController::state() const {
  const MutexLock lock(state_mutex_);
  ControllerState state = public_;
  state.engine = kEngineStates[static_cast<size_t>(state_)];
  return state;
}

bool SleepController::is_sleeping() const { return !is_in(State::kAwake); }

Error SleepController::busy() const {
  return {.code = Code::kUnavailable,
          .what = fmt::format("the engine is {}", state().engine),
          .next_step = "wait for that to end"};
}

// Whether there is an engine to put to sleep.
Status SleepController::may_begin() const {
  if (lost())
    return Error{.code = Code::kFailedPrecondition,
                 .what = "the engine is unrecoverable",
                 .next_step = "start a new one and wake it from its last checkpoint"};
  if (held_sleep_ != nullptr)
    return Error{.code = Code::kFailedPrecondition,
                 .what = "a sleep waits for the word of its front end",
                 .next_step = "end it first"};
  if (held_)
    return Error{.code = Code::kFailedPrecondition,
                 .what = "a restored checkpoint waits for its front end",
                 .next_step = "end the wake first"};
  return ok();
}

Status SleepController::can_preserve(std::string_view otherwise) {
  TORPOR_ASSIGN(const std::vector<std::string> unsupported, hooks_.unsupported());
  if (unsupported.empty()) return ok();
  return Error{.code = Code::kUnsupported,
               .what = fmt::format("the state of this engine cannot be preserved yet: {}", joined(unsupported, "; ")),
               .next_step = std::string(otherwise)};
}

Status SleepController::check(const SleepOptions& options) const {
  const auto invalid = [](std::string what, std::string next) {
    return Error{.code = Code::kInvalidArgument, .what = std::move(what), .next_step = std::move(next)};
  };
  if (options.level < 0 || options.level > 2)
    return invalid(fmt::format("level is {}", options.level), "use 0, 1 or 2");
  if (options.in_flight != "freeze" && options.in_flight != "abort" && options.in_flight != "recompute") {
    return invalid(fmt::format("in_flight is \"{}\"", options.in_flight), "use \"freeze\", \"abort\" or \"recompute\"");
  }
  if (options.preserve_state != (options.in_flight == "freeze") && options.level > 0) {
    return invalid(
        fmt::format("preserve_state is {} and in_flight is \"{}\"", options.preserve_state, options.in_flight),
        "\"freeze\" goes with preserve_state, \"abort\" and \"recompute\" go without");
  }
  if (options.to_disk && options.level == 0)
    return invalid("level 0 keeps all memory, there is nothing to write to disk", "use level 1 or 2");
  TORPOR_TRY(check_metadata(options.metadata, options.to_disk));
  if (options.to_disk && options_.directory.empty()) {
    return invalid("no directory for checkpoints is configured",
                   "set the option checkpoint_dir (or TORPOR_CHECKPOINT_DIR) and start the engine again");
  }
  const DataParallel& place = options.data_parallel;
  if (place.size < 1 || place.rank < 0 || place.rank >= place.size)
    return invalid(fmt::format("data parallel rank {} of {}", place.rank, place.size), "use a rank below the size");
  if (options.timeout_seconds && !(*options.timeout_seconds >= 0))
    return invalid(fmt::format("timeout is {} s", *options.timeout_seconds), "use 0 or more, or none");
  return ok();
}

std::string SleepController::directory_of(const DataParallel& place) const {
  return place.size > 1 ? rank_directory(options_.directory, place.rank, place.size) : options_.directory;
}

Result<std::vector<std::string>> SleepController::select_tags(const std::vector<std::string>& wanted,
                                                              const RankLedger& ledger) const {
  std::vector<std::string> selected;
  for (const auto& [tag, entry] : ledger.tags) {
    if (wanted.empty() || has_tag(wanted, tag)) selected.push_back(tag);
  }
  for (const std::string& tag : wanted) {
    if (has_tag(selected, tag)) continue;
    std::vector<std::string> known;
    for (const auto& [name, entry] : ledger.tags) known.push_back(name);
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("there is no tag \"{}\"", tag),
                 .next_step = fmt::format("use some of: {}", joined(known, ", "))};
  }
  sort_for_wake(selected);
  return selected;
}

Result<std::unique_ptr<CheckpointManager>> SleepController::manager(const std::string& directory) const {
  CheckpointManagerOptions options = options_.checkpoints;
  options.clock = &clock_;
  return CheckpointManager::open(file_system_, directory, std::move(options));
}

// Names the owner in it. The fingerprint is whole by now.
void SleepController::sign(PendingCheckpoint& checkpoint, const Fingerprint& fingerprint) {
  if (!owner_) owner_ = owner_of(fingerprint);
  checkpoint.set_owner(*owner_);
}

Result<Fingerprint> SleepController::fingerprint() {
  return catching([this] { return fingerprint_now(); });
}

Result<Fingerprint> SleepController::fingerprint_now() {
  TORPOR_ASSIGN(const Described described, ranks_.call(orders::Describe{}));
  return fingerprint_of(described, WeightsDigest::kReadOrProven);
}

Result<Fingerprint> SleepController::fingerprint_of(const Described& described, WeightsDigest weights) {
  TORPOR_ASSIGN(Fingerprint fields, hooks_.fingerprint());
  fields["ranks"] = std::to_string(described.size());
  if (weights != WeightsDigest::kNone && described.front().ledger.tags.contains(kWeightsTag)) {
    const bool as_proven = weights == WeightsDigest::kReadOrProven;
    TORPOR_ASSIGN(const bool named, add_named_weights(fields, as_proven));
    if (named) return fields;
    TORPOR_ASSIGN(const std::vector<orders::DigestTags::Reply> digested,
                  ranks_.call(orders::DigestTags{.tags = {kWeightsTag}, .as_proven = as_proven}));
    add_weights(fields, digested);
  }
  return fields;
}

Result<bool> SleepController::add_named_weights(Fingerprint& fields, bool as_proven) {
  TORPOR_ASSIGN(const std::vector<orders::DigestTags::Reply> digested,
                ranks_.call(orders::DigestTags{.tags = {kWeightsTag}, .as_proven = as_proven, .named = true}));
  if (std::any_of(digested.begin(), digested.end(), [](const auto& reply) { return reply.digests.empty(); }))
    return false;
  add_weights(fields, digested);
  return true;
}

Result<SleepPlan> SleepController::plan_sleep(const SleepOptions& options) {
  return catching([&] { return plan_sleep_now(options); });
}

Result<SleepPlan> SleepController::plan_sleep_now(const SleepOptions& options) {
  if (!operation_mutex_.try_lock()) return busy();
  const MutexLock in_progress(operation_mutex_, std::adopt_lock);
  TORPOR_TRY(wait_for_late());
  SleepPlan plan;
  if (const Status valid = check(options); !valid) plan.problems.push_back(valid.error().to_string());
  const bool asleep = state().engine == "asleep";
  if (is_sleeping() && !asleep) plan.problems.push_back(fmt::format("the engine is {}", state().engine));
  if (options.preserve_state) {
    TORPOR_ASSIGN(const std::vector<std::string> unsupported, hooks_.unsupported());
    for (const std::string& feature : unsupported)
      plan.problems.push_back(fmt::format("cannot be preserved: {}", feature));
  }
  if (!plan.problems.empty()) return plan;
  TORPOR_ASSIGN(const Described described, ranks_.call(orders::Describe{}));
  TORPOR_ASSIGN(std::vector<std::string> tags, select_tags(options.tags, described.front().ledger));
  std::erase_if(tags,
                [&](const std::string& tag) TORPOR_REQUIRES(operation_mutex_) { return has_tag(sleeping_tags_, tag); });
  if (asleep && (tags.empty() || options.level == 0)) plan.problems.push_back("already asleep");
  TORPOR_ASSIGN(plan.requests, hooks_.unfinished_requests());
  if (options.level == 0) return plan;
  if (options.to_disk && !asleep && !options.discard_on_save_error) {
    const Status seen = seen_by_all(directory_of(options.data_parallel), described.size());
    if (!seen) plan.problems.push_back(seen.error().to_string());
  }
  orders::PlanSave planned;
  if (options.preserve_state && has_tag(tags, kKvCacheTag)) {
    TORPOR_ASSIGN(const SchedulerCheckpoint state, hooks_.capture());
    const LiveBlocks live = select_live_blocks(state.kv, block_bytes(described).most, options_.kv_budget_bytes);
    plan.kept_blocks = static_cast<int64_t>(live.kept.size());
    plan.dropped_blocks = static_cast<int64_t>(live.dropped.size());
    name_blocks(planned.save, state, live.kept);
    if (!options.to_disk) {
      TORPOR_ASSIGN(planned.save.host_slots, hooks_.host_slots(planned.save.blocks, /*keep=*/false));
    }
  }
  for (const std::string& tag : tags) {
    plan.free_bytes[tag] = tag_bytes(described, tag, &RankLedger::Tag::physical_bytes);
    if (tag == kKvCacheTag) {
      plan.save_bytes[tag] = static_cast<uint64_t>(plan.kept_blocks) * block_bytes(described).all;
    } else if (!options.drops(tag)) {
      plan.save_bytes[tag] = tag_bytes(described, tag, &RankLedger::Tag::region_bytes);
    }
    if (!options.drops(tag)) planned.save.tags.push_back(tag);
  }
  for (const auto& [tag, bytes] : plan.save_bytes) (options.to_disk ? plan.disk_bytes : plan.host_bytes) += bytes;
  if (options.to_disk) {
    TORPOR_ASSIGN(const std::unique_ptr<CheckpointManager> checkpoints, manager(directory_of(options.data_parallel)));
    planned.save.writing = checkpoints->next_writing();
    planned.save.as_proven = !options_.always_read_weights;
    if (planned.save.writing.base.empty()) return plan;
  }
  TORPOR_ASSIGN(const std::vector<orders::PlanSave::Reply> replies, ranks_.call(planned));
  for (auto& [tag, bytes] : plan.save_bytes) bytes = 0;
  for (const orders::PlanSave::Reply& reply : replies) {
    for (const auto& [tag, bytes] : reply.copied_bytes) plan.save_bytes[tag] += bytes;
    plan.reused_bytes += reply.reused_bytes;
    plan.disk_bytes += reply.spilled_bytes;
  }
  if (!options.to_disk) plan.host_bytes -= plan.disk_bytes;
  return plan;
}

Result<std::vector<RankLedger>> SleepController::ledgers() {
  return catching([this]() -> Result<std::vector<RankLedger>> {
    TORPOR_ASSIGN(const Described described, ranks_.call(orders::Describe{}));
    remember(described);
    return ledgers_of(described);
  });
}

}  // namespace torpor
