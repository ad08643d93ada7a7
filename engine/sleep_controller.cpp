// SPDX-License-Identifier: Apache-2.0
#include "engine/sleep_controller.h"

#include <algorithm>

#include <fmt/core.h>

#include "base/log.h"
#include "base/swap_channel.h"
#include "base/text.h"
#include "engine/sleep_planner.h"

namespace torpor {
namespace {

using At = EngineState::At;

Error cannot(std::string what, std::string next) {
  return {.code = Code::kFailedPrecondition, .what = std::move(what), .next_step = std::move(next)};
}

}  // namespace

// A sleep or checkpoint that waits for end_sleep(), and its options.
struct SleepController::HeldSleep {
  HeldSleep(OperationContext& context, std::string_view name, const SleepOptions& asked)
      : options(asked), sleep(context, name, options) {}

  const SleepOptions options;
  SleepOperation sleep;
  bool only_checkpoint = false;
};

SleepController::SleepController(EngineHooks& hooks, FileSystem& file_system, const Clock& clock,
                                 SleepControllerOptions options, EventPort port)
    : hooks_(hooks),
      ranks_(hooks_),
      clock_(clock),
      options_(std::move(options)),
      state_(port),
      parts_{.hooks = hooks_,
             .ranks = ranks_,
             .file_system = file_system,
             .clock = clock_,
             .options = options_,
             .port = port,
             .state = state_},
      context_(parts_) {}

// Undo a held sleep: its requests go on.
SleepController::~SleepController() {
  cancel_checkpoint();
  held_sleep_.reset();
}

ControllerState SleepController::state() const { return state_.view(); }
bool SleepController::is_sleeping() const { return !state_.is(At::kAwake); }

// --- sleep ---

Result<SleepReport> SleepController::sleep(const SleepOptions& options) {
  return try_catch([&] { return options.swap_out_to.empty() ? sleep_now(options) : swap_out(options); });
}

Result<SleepReport> SleepController::sleep_now(const SleepOptions& options) {
  if (!operation_mutex_.try_lock()) return busy();
  const MutexLock in_progress(operation_mutex_, std::adopt_lock);
  TORPOR_RETURN_IF_ERROR(check(options));
  TORPOR_RETURN_IF_ERROR(may_begin());
  TORPOR_RETURN_IF_ERROR(context_.deferred.wait());
  end_or_wait_for_checkpoint("a sleep was asked for");
  if (is_sleeping()) {
    TORPOR_ASSIGN_OR_RETURN(const bool more, frees_more(options));
    if (!more) {
      // The caller wants a checkpoint, and may end the process next.
      if (options.to_disk && !context_.asleep.checkpoint) return cannot_sleep_to_disk(context_.asleep.tags);
      log().warn("sleep: the engine is already asleep");
      SleepReport report;
      report.level = state().level;
      report.note = "already asleep";
      report.reload = context_.asleep.without_content;
      if (options.drops(kWeightsTag) && !has_tag(report.reload, kWeightsTag))
        report.note += fmt::format(" at level {}; what it saved stays: wake it to sleep deeper", report.level);
      return report;
    }
  }
  const auto prepare = [](SleepOperation& sleep) { return try_catch([&] { return sleep.prepare_sleep(); }); };
  if (options.data_parallel.size > 1) {
    auto held = std::make_unique<HeldSleep>(context_, "sleep", options);
    if (Status saved = prepare(held->sleep); !saved) return held->sleep.undone(std::move(saved).error());
    return hold_sleep(std::move(held));
  }
  SleepOperation sleep(context_, "sleep", options);
  if (Status saved = prepare(sleep); !saved) return sleep.undone(std::move(saved).error());
  return finish_sleep(sleep);
}

// Return whether a sleep of a sleeping engine would free more memory.
Result<bool> SleepController::frees_more(const SleepOptions& options) {
  if (options.level == 0) return false;
  TORPOR_ASSIGN_OR_RETURN(const Described described, ranks_.call(orders::Describe{}));
  TORPOR_ASSIGN_OR_RETURN(const std::vector<std::string> tags, select_tags(options.tags, described));
  const std::vector<std::string>& asleep = context_.asleep.tags;
  return std::any_of(tags.begin(), tags.end(), [&](const std::string& tag) { return !has_tag(asleep, tag); });
}

Result<SleepReport> SleepController::finish_sleep(SleepOperation& sleep) {
  if (Status asleep = try_catch([&] { return sleep.commit_sleep(); }); !asleep)
    return sleep.undone(std::move(asleep).error());
  sleep.retire_older();
  return std::move(sleep.report());
}

Result<SleepReport> SleepController::hold_sleep(std::unique_ptr<HeldSleep> held) {
  Result<SleepReport> report = try_catch([&]() -> Result<SleepReport> { return held->sleep.report(); });
  if (!report) return held->sleep.undone(std::move(report).error());
  report->held = true;
  held_sleep_ = std::move(held);
  return report;
}

Result<SleepReport> SleepController::end_sleep(bool keep) {
  return try_catch([&] { return end_sleep_now(keep); });
}

Result<SleepReport> SleepController::end_sleep_now(bool keep) {
  const MutexLock in_progress(operation_mutex_);
  if (held_sleep_ == nullptr)
    return Error{.code = Code::kFailedPrecondition, .what = "no sleep is held", .next_step = "sleep with hold first"};
  const std::unique_ptr<HeldSleep> held = std::move(held_sleep_);
  if (keep) return held->only_checkpoint ? serve_on(held->sleep) : finish_sleep(held->sleep);
  Error error = held->sleep.undone({.code = Code::kAborted, .what = "it was taken back", .next_step = "none"});
  if (error.state_changed) return error;
  SleepReport report;
  report.note = "taken back";
  report.fully_awake = !is_sleeping();
  return report;
}

Result<SleepPlan> SleepController::plan_sleep(const SleepOptions& options) {
  return try_catch([&]() -> Result<SleepPlan> {
    if (!operation_mutex_.try_lock()) return busy();
    const MutexLock in_progress(operation_mutex_, std::adopt_lock);
    TORPOR_RETURN_IF_ERROR(context_.deferred.wait());
    return plan_of_sleep(context_, options, check(options), /*being_written=*/background_ != nullptr);
  });
}

// --- checkpoint ---

Result<SleepReport> SleepController::checkpoint(const Value& outputs, DataParallel data_parallel,
                                                const std::string& progress, const Metadata& metadata) {
  return try_catch([&] {
    SleepOptions options = BackgroundCheckpoint::options_of(progress, metadata);
    options.outputs = outputs;
    options.data_parallel = data_parallel;
    return checkpoint_now(options);
  });
}

Result<SleepReport> SleepController::checkpoint_now(const SleepOptions& options) {
  if (!operation_mutex_.try_lock()) return busy();
  const MutexLock in_progress(operation_mutex_, std::adopt_lock);
  TORPOR_RETURN_IF_ERROR(may_checkpoint(options));
  end_or_wait_for_checkpoint("another one was asked for");
  const auto write = [](SleepOperation& sleep) { return try_catch([&] { return sleep.prepare_checkpoint(); }); };
  if (options.data_parallel.size > 1) {
    auto held = std::make_unique<HeldSleep>(context_, "checkpoint", options);
    held->only_checkpoint = true;
    if (Status written = write(held->sleep); !written) return held->sleep.undone(std::move(written).error());
    return hold_sleep(std::move(held));
  }
  SleepOperation sleep(context_, "checkpoint", options);
  if (Status written = write(sleep); !written) return sleep.undone(std::move(written).error());
  return serve_on(sleep);
}

Result<SleepReport> SleepController::serve_on(SleepOperation& sleep) {
  if (Status serves = try_catch([&] { return sleep.serve_on(); }); !serves)
    return sleep.undone(std::move(serves).error());
  sleep.retire_older();  // while the engine runs again
  return std::move(sleep.report());
}

// For an engine that serves; it first waits for deferred blocks of the last wake.
Status SleepController::may_checkpoint(const SleepOptions& options) {
  TORPOR_RETURN_IF_ERROR(check(options));
  TORPOR_RETURN_IF_ERROR(may_begin());
  if (is_sleeping()) return cannot("the engine is asleep", "wake it first, or let it sleep to disk");
  return context_.deferred.wait();
}

Status SleepController::check_directory() {
  return try_catch([this]() -> Status {
    if (!operation_mutex_.try_lock()) return busy();
    const MutexLock in_progress(operation_mutex_, std::adopt_lock);
    TORPOR_ASSIGN_OR_RETURN(const size_t ranks, count_ranks());
    return background_ != nullptr ? ok() : context_.checkpoints.check_seen_by_all(options_.directory, ranks);
  });
}

Status SleepController::begin_checkpoint(const std::string& progress, const Metadata& metadata) {
  return try_catch([&]() -> Status {
    if (!operation_mutex_.try_lock()) return busy();
    const MutexLock in_progress(operation_mutex_, std::adopt_lock);
    SleepOptions options = BackgroundCheckpoint::options_of(progress, metadata);
    TORPOR_RETURN_IF_ERROR(may_checkpoint(options));
    if (background_ != nullptr && !background_->ended())
      return Error{.code = Code::kUnavailable,
                   .what = "a checkpoint is being written",
                   .next_step = "wait for it to end, or cancel it"};
    TORPOR_RETURN_IF_ERROR(parts_.can_preserve(EngineParts::kNoCheckpoint));
    auto background = std::make_unique<BackgroundCheckpoint>(context_, std::move(options));
    TORPOR_RETURN_IF_ERROR(background->begin());
    background_ = std::move(background);
    return ok();
  });
}

Result<CheckpointStage> SleepController::continue_checkpoint() {
  return try_catch([this]() -> Result<CheckpointStage> {
    if (!operation_mutex_.try_lock()) return busy();
    const MutexLock in_progress(operation_mutex_, std::adopt_lock);
    return background_ == nullptr ? CheckpointStage::kNone : background_->advance(/*wait=*/false);
  });
}

Status SleepController::take_checkpoint(const Value& outputs) {
  return try_catch([&]() -> Status {
    if (!operation_mutex_.try_lock()) return busy();
    const MutexLock in_progress(operation_mutex_, std::adopt_lock);
    if (background_ != nullptr && background_->error()) return *background_->error();
    TORPOR_RETURN_IF_ERROR(may_begin());
    if (background_ == nullptr || !background_->ready())
      return cannot("no checkpoint is ready to be taken", "begin one, and continue it until it is ready");
    return background_->take(outputs);
  });
}

Result<SleepReport> SleepController::end_checkpoint() {
  return try_catch([this]() -> Result<SleepReport> {
    if (!operation_mutex_.try_lock()) return busy();
    const MutexLock in_progress(operation_mutex_, std::adopt_lock);
    if (background_ == nullptr || !background_->can_finish())
      return cannot("no checkpoint was taken", "begin one, continue it until it is ready, and take it");
    Result<SleepReport> ended = background_->finish();
    background_.reset();
    return ended;
  });
}

void SleepController::cancel_checkpoint() noexcept {
  const MutexLock in_progress(operation_mutex_);
  if (background_ != nullptr) background_->cancel();
  background_.reset();
}

// Called before another operation.
void SleepController::end_or_wait_for_checkpoint(std::string_view why) noexcept {
  if (background_ != nullptr) background_->end_or_wait(why);
}

// --- wake ---

Result<SleepReport> SleepController::wake_up(const WakeOptions& options) {
  return try_catch([&] { return options.swap_in_from.empty() ? wake_now(options) : swap_in(options); });
}

Result<SleepReport> SleepController::wake_now(const WakeOptions& options, const SwapIn* swap) {
  if (!operation_mutex_.try_lock()) return busy();
  const MutexLock in_progress(operation_mutex_, std::adopt_lock);
  TORPOR_RETURN_IF_ERROR(may_begin());
  const At before = state_.at();
  const bool anew = !options.from_checkpoint.empty() || options.catch_up;
  if (anew && (!options.tags.empty() || options.old_kv != OldKv::kUnsaid)) {
    return Error{.code = Code::kInvalidArgument,
                 .what = "a checkpoint wakes whole, with the KV that it has: tags and kv say nothing of it",
                 .next_step = "leave tags and kv out"};
  }
  if (before == At::kAwake && !anew) {
    log().warn("wake_up: the engine is already awake");
    SleepReport report;
    report.note = "already awake";
    report.fully_awake = true;
    return report;
  }
  if (before == At::kAsleep && anew)
    return cannot("this engine is asleep with a state of its own",
                  "wake it without from_checkpoint, or wake the checkpoint in a new engine");
  TORPOR_RETURN_IF_ERROR(context_.deferred.wait());
  end_or_wait_for_checkpoint("a wake was asked for");
  return WakeOperation(context_, options, swap).run();
}

Result<WakeProgress> SleepController::continue_wake(DeferredWait wait, const DeferredWishes& wishes) {
  return try_catch([&]() -> Result<WakeProgress> {
    if (!operation_mutex_.try_lock()) return busy();
    const MutexLock in_progress(operation_mutex_, std::adopt_lock);
    return context_.deferred.take(wait, wishes);
  });
}

// If the restored requests can be neither dropped nor run, the engine is unrecoverable.
Status SleepController::end_hold(bool keep) {
  return try_catch([&] { return end_hold_now(keep); });
}

Status SleepController::end_hold_now(bool keep) {
  const MutexLock in_progress(operation_mutex_);
  if (!context_.wake_is_held) return cannot("nothing is held", "wake with hold first");
  context_.wake_is_held = false;
  context_.took_checkpoint = keep;
  const auto from = std::exchange(context_.asleep.checkpoint, {});
  // Deferred blocks come while it is held. Nothing may be written into blocks that are given out anew.
  Status ended = keep ? ok() : context_.deferred.wait();
  if (ended && !keep) ended = hooks_.forget_restored();
  if (ended) ended = hooks_.resume();
  if (!ended) {
    state_.mark_unrecoverable(ended.error());
    Error error = std::move(ended).error();
    error.state_changed = true;
    return error;
  }
  state_.enter(At::kAwake);
  if (keep && from) context_.checkpoints.mark_woken(*from);
  return ok();
}

Result<std::string> SleepController::checkpoint_to_wake() {
  return try_catch([&]() -> Result<std::string> {
    if (!operation_mutex_.try_lock()) return busy();
    const MutexLock in_progress(operation_mutex_, std::adopt_lock);
    if (options_.directory.empty() || !state_.is(At::kAwake)) return std::string();
    TORPOR_ASSIGN_OR_RETURN(const int64_t unfinished, hooks_.unfinished_requests());
    TORPOR_ASSIGN_OR_RETURN(const KvContents contents, hooks_.kv_contents());
    if (unfinished > 0 || contents.steps != 1 || context_.took_checkpoint) return std::string();
    const Result<Checkpoint> latest = open_checkpoint(parts_.file_system, options_.directory, options_.checkpoints.key);
    if (!latest && latest.error().code == Code::kNotFound) return std::string();
    return options_.directory;  // the wake reports what is wrong with it
  });
}

// --- swap ---

Result<SwapReport> SleepController::swap(SleepController& from, SleepController& to, const SwapOptions& options) {
  return try_catch([&] { return from.swap_with(to, options); });
}

Result<SwapReport> SleepController::swap_with(SleepController& to, const SwapOptions& options) {
  if (&to == this)
    return Error{.code = Code::kInvalidArgument, .what = "swap: it is one engine", .next_step = "name two"};
  const SleepOptions asked{.preserve_state = true,
                           .timeout_seconds = options.timeout_seconds,
                           .outputs = options.outputs,
                           .progress = options.progress,
                           .swap_out_to = kThisProcess};
  Result<SwapReport> swapped = swap_out_for(
      asked, {.admit = [&]() -> Status {
                TORPOR_ASSIGN_OR_RETURN(const size_t others, to.can_swap_in());
                TORPOR_ASSIGN_OR_RETURN(const size_t own, count_ranks());
                if (own == others) return ok();
                return cannot(fmt::format("the engines have {} and {} ranks", own, others),
                              "put one to sleep, then wake the other");
              },
              .swap =
                  [&](SleepOperation& sleep, SwapOutEnd&) {
                    return swap_out_here(sleep, [&](const SwapIn& from) { return to.wake_now({}, &from); });
                  }});
  if (swapped || !to.state_.unrecoverable()) return swapped;
  Error error = std::move(swapped).error();
  error.state_changed = true;
  return error;
}

// Swap out, with an engine of another process that swaps in.
Result<SleepReport> SleepController::swap_out(const SleepOptions& options) {
  TORPOR_RETURN_IF_ERROR(check(options));
  if (options.level == 0 || !options.preserve_state || options.to_disk || options.drops(kWeightsTag) ||
      !options.tags.empty() || options.data_parallel.size > 1 || options.discard_on_save_error) {
    return Error{.code = Code::kInvalidArgument,
                 .what = "swap: memory is given by a sleep to host memory of all that there is",
                 .next_step = "ask for preserve_state, and nothing else"};
  }
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<SwapChannel> channel, SwapChannel::open(options.swap_out_to));
  const auto watched = ProgressFile::of_caller(options.progress);
  const auto go_on = [&] { return watched == nullptr ? ok() : watched->check(); };
  Result<SwapReport> left = swap_out_for(
      options, {.admit = [&]() -> Status {
                  TORPOR_ASSIGN_OR_RETURN(const size_t ranks, count_ranks());
                  TORPOR_RETURN_IF_ERROR(channel->join(SwapChannel::Side::kSwapsOut, ranks));
                  return channel->wait_for(SwapChannel::Stage::kHere, go_on);
                },
                .swap = [&](SleepOperation& sleep,
                            SwapOutEnd& end) { return swap_out_to(sleep, *channel, options.swap_out_to, end); }});
  if (left) return std::move(left->slept);
  (void)channel->stop(SwapChannel::Side::kSwapsOut);
  channel->reach(SwapChannel::Stage::kFailed);
  return std::move(left).error();
}

// Swap in, with an engine of another process that swaps out.
Result<SleepReport> SleepController::swap_in(const WakeOptions& options) {
  if (!options.tags.empty() || !options.from_checkpoint.empty() || options.catch_up || options.hold || options.early ||
      options.old_kv != OldKv::kUnsaid) {
    return Error{.code = Code::kInvalidArgument,
                 .what = "swap: memory is taken by a wake of all that sleeps in this process",
                 .next_step = "ask for nothing else"};
  }
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<SwapChannel> channel, SwapChannel::open(options.swap_in_from));
  const auto watched = ProgressFile::of_caller(options.progress);
  const auto go_on = [&] { return watched == nullptr ? ok() : watched->check(); };
  Result<SleepReport> woken = try_catch([&]() -> Result<SleepReport> {
    TORPOR_ASSIGN_OR_RETURN(const size_t ranks, can_swap_in());
    TORPOR_RETURN_IF_ERROR(channel->join(SwapChannel::Side::kSwapsIn, ranks));
    TORPOR_RETURN_IF_ERROR(channel->wait_for(SwapChannel::Stage::kReady, go_on));
    const SwapIn swap{.channel = options.swap_in_from,
                      .wait_until_asleep = [&]() -> Status {
                        channel->reach(SwapChannel::Stage::kReady);
                        TORPOR_RETURN_IF_ERROR(channel->wait_for(SwapChannel::Stage::kDone));
                        return channel->reach(SwapChannel::Stage::kReady), ok();  // a heartbeat
                      },
                      .commit = [&] { return channel->commit(); }};
    TORPOR_ASSIGN_OR_RETURN(SleepReport report, wake_now({.progress = options.progress}, &swap));
    if (!report.changed) return cannot(fmt::format("the engine that is to come: {}", report.note), "");
    return report;
  });
  if (woken) return channel->reach(SwapChannel::Stage::kDone), std::move(woken);
  (void)channel->stop(SwapChannel::Side::kSwapsIn);
  channel->reach(state_.unrecoverable() ? SwapChannel::Stage::kLost : SwapChannel::Stage::kFailed);
  Error error = std::move(woken).error();
  (void)try_catch([&]() -> Status { return error.what = fmt::format("swap: {}", error.what), ok(); });
  return error;
}

Result<SwapReport> SleepController::swap_out_for(const SleepOptions& asked, const OtherEngine& other) {
  const std::chrono::nanoseconds began = clock_.now();
  SwapOutEnd end;
  Result<SwapReport> swapped = try_catch([&]() -> Result<SwapReport> {
    if (!operation_mutex_.try_lock()) return busy();
    const MutexLock in_progress(operation_mutex_, std::adopt_lock);
    return begin_swap_out(asked, other, end);
  });
  if (swapped) {
    swapped->seconds = seconds_between(began, clock_.now());
    return swapped;
  }
  Error error = std::move(swapped).error();
  Status woken;
  if (end.state == SwappedOut::kAsleepOtherEnded) {
    // All is in host memory. The other engine has released what it had, unless it is unrecoverable or sends no
    // heartbeat.
    woken = try_catch([&] {
      return retry_until_memory_comes(clock_, end.memory_comes_late, [&]() -> Status {
        TORPOR_RETURN_IF_ERROR(wake_now({}));
        return ok();
      });
    });
  }
  const bool stays =
      end.state == SwappedOut::kAsleepOtherMayRun || (end.state == SwappedOut::kAsleepOtherEnded && !woken);
  error.state_changed = state_.unrecoverable() || stays;
  (void)try_catch([&]() -> Status {
    error.what = fmt::format("swap: {}", error.what);
    if (stays) error.what += "; the engine that went stays asleep";
    if (!woken) error.what += fmt::format(": {}", woken.error().to_string());
    return ok();
  });
  return error;
}

Result<SwapReport> SleepController::begin_swap_out(const SleepOptions& asked, const OtherEngine& other,
                                                   SwapOutEnd& end) {
  TORPOR_RETURN_IF_ERROR(may_begin());
  if (is_sleeping()) return cannot("the engine that is to go is asleep", "wake the other one without it");
  TORPOR_RETURN_IF_ERROR(other.admit());
  TORPOR_RETURN_IF_ERROR(context_.deferred.wait());
  end_or_wait_for_checkpoint("a swap was asked for");
  SleepOperation sleep(context_, "sleep", asked);
  if (Status ready = try_catch([&] { return sleep.prepare_swap_out(); }); !ready)
    return sleep.undone(std::move(ready).error());
  Result<SleepReport> woken = try_catch([&] { return other.swap(sleep, end); });
  if (woken) return SwapReport{.slept = std::move(sleep.report()), .woken = std::move(*woken)};
  if (!state_.is(At::kAsleep)) return sleep.undone(std::move(woken).error());
  if (end.state == SwappedOut::kAwake) end.state = SwappedOut::kAsleepOtherEnded;
  return std::move(woken).error();
}

// Return the number of ranks of this engine, if it can swap in.
Result<size_t> SleepController::can_swap_in() {
  const ControllerState own = state();
  if (own.engine != "asleep") return cannot(fmt::format("the engine that is to come is {}", own.engine), "");
  if (own.level < 1) return cannot("the engine that is to come is only paused", "wake it without the other");
  if (!operation_mutex_.try_lock()) return busy();
  const MutexLock in_progress(operation_mutex_, std::adopt_lock);
  if (const std::vector<std::string>& empty = context_.asleep.without_content; !empty.empty())
    return cannot(fmt::format("the engine that is to come has not kept its {}", joined(empty, ", ")),
                  "load them in a wake of its own");
  return count_ranks();
}

Result<size_t> SleepController::count_ranks() {
  TORPOR_ASSIGN_OR_RETURN(const Described described, ranks_.call(orders::Describe{}));
  return described.size();
}

// --- the state of the engine, and which calls it allows ---

Result<Fingerprint> SleepController::fingerprint() {
  return try_catch([this]() -> Result<Fingerprint> {
    TORPOR_ASSIGN_OR_RETURN(const Described described, ranks_.call(orders::Describe{}));
    return fingerprint_of(parts_, described, WeightsDigest::kReadOrProven);
  });
}

Result<std::vector<RankLedger>> SleepController::ledgers() {
  return try_catch([this]() -> Result<std::vector<RankLedger>> {
    TORPOR_ASSIGN_OR_RETURN(const Described described, ranks_.call(orders::Describe{}));
    state_.set_tags(described);
    return ledgers_of(described);
  });
}

Error SleepController::busy() const {
  return {.code = Code::kUnavailable,
          .what = fmt::format("another operation is in progress; the engine is {}", state().engine),
          .next_step = "wait for that to end"};
}

// Return an error unless an operation may begin.
Status SleepController::may_begin() const {
  if (state_.unrecoverable())
    return cannot("the engine is unrecoverable", "start a new one and wake it from its last checkpoint");
  if (held_sleep_ != nullptr) return cannot("a sleep waits for the word of its front end", "end it first");
  if (context_.wake_is_held) return cannot("a restored checkpoint waits for its front end", "end the wake first");
  return ok();
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
  TORPOR_RETURN_IF_ERROR(check_metadata(options.metadata, options.to_disk));
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

}  // namespace torpor
