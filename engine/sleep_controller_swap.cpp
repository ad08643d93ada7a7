// SPDX-License-Identifier: Apache-2.0
// SleepController::swap(): one engine falls asleep while another wakes on its memory.
//
// In this order: the one that goes stands still and is captured; then, at once, it is copied and gives its memory page
// by page, and the other takes it. When all is copied and gone, the first is asleep, and only then may the other run
// and its backup go. So what fails before is undone: first the other one gives back what it has, then the first takes
// it.
//
// Engines of two processes do the same, each its half, and say in a SwapChannel how far they are.
#include "engine/sleep_controller.h"

#include <chrono>
#include <thread>

#include <fmt/core.h>

#include "base/log.h"
#include "base/shared_folder.h"
#include "base/swap_channel.h"
#include "base/text.h"
#include "engine/sleep_in_progress.h"

namespace torpor {
namespace {

// A SwapChannel in a folder of its own; both are gone in the end.
class Room {
 public:
  static Result<std::unique_ptr<Room>> make() {
    auto room = std::make_unique<Room>();
    TORPOR_ASSIGN(room->folder, SharedFolder::make());
    room->path = fmt::format("{}/room", room->folder->path());
    TORPOR_ASSIGN(room->file, SwapChannel::create(room->path, SwapChannel::kNoBound));  // no engine waits for a process
    return room;
  }
  std::unique_ptr<SharedFolder> folder;
  std::string path;
  std::unique_ptr<SwapChannel> file;
};

// Stands in for the path of a channel, so that the sleep keeps scratch memory too. exchange() makes the channel.
constexpr const char* kThisProcess = "this process";
constexpr std::chrono::seconds kMemoryComes{30};
constexpr std::chrono::milliseconds kLookAgain{50};

Error cannot(std::string what, std::string next) {
  return {.code = Code::kFailedPrecondition, .what = std::move(what), .next_step = std::move(next)};
}

}  // namespace

Result<SwapReport> SleepController::swap(SleepController& from, SleepController& to, const SwapOptions& options) {
  return catching([&] { return from.swap_now(to, options); });
}

Result<SwapReport> SleepController::swap_now(SleepController& to, const SwapOptions& options) {
  if (&to == this)
    return Error{.code = Code::kInvalidArgument, .what = "swap: it is one engine", .next_step = "name two"};
  const SleepOptions asked{.preserve_state = true,
                           .timeout_seconds = options.timeout_seconds,
                           .outputs = options.outputs,
                           .progress = options.progress,
                           .swap_out_to = kThisProcess};
  Result<SwapReport> swapped = leave(
      asked,
      {.admit = [&]() -> Status {
         TORPOR_ASSIGN(const size_t others, to.may_come());
         TORPOR_ASSIGN(const size_t own, count_ranks());
         if (own == others) return ok();
         return cannot(fmt::format("the engines have {} and {} ranks", own, others),
                       "put one to sleep, then wake the other");
       },
       .exchange = [&](FallingAsleep& sleep, Gone&) TORPOR_REQUIRES(operation_mutex_) { return exchange(sleep, to); }});
  if (swapped || !to.lost()) return swapped;
  Error error = std::move(swapped).error();
  error.state_changed = true;
  return error;
}

// The half of the one that goes.
Result<SleepReport> SleepController::give_now(const SleepOptions& options) {
  TORPOR_TRY(check(options));
  if (options.level == 0 || !options.preserve_state || options.to_disk || options.drops(kWeightsTag) ||
      !options.tags.empty() || options.data_parallel.size > 1 || options.discard_on_save_error) {
    return Error{.code = Code::kInvalidArgument,
                 .what = "swap: memory is given by a sleep to host memory of all that there is",
                 .next_step = "ask for preserve_state, and nothing else"};
  }
  TORPOR_ASSIGN(const std::unique_ptr<SwapChannel> room, SwapChannel::open(options.swap_out_to));
  const auto watched = ProgressFile::of_caller(options.progress);
  const auto go_on = [&] { return watched == nullptr ? ok() : watched->check(); };
  Result<SwapReport> left = leave(
      options, {.admit = [&]() -> Status {
                  TORPOR_ASSIGN(const size_t ranks, count_ranks());
                  TORPOR_TRY(room->join(SwapChannel::Side::kGives, ranks));
                  return room->wait_for(SwapChannel::Stage::kHere, go_on);
                },
                .exchange = [&](FallingAsleep& sleep, Gone& gone)
                                TORPOR_REQUIRES(operation_mutex_) { return exchange_by_file(sleep, *room, gone); }});
  if (left) return std::move(left->slept);
  (void)room->stop(SwapChannel::Side::kGives);
  room->say(SwapChannel::Stage::kFailed);
  return std::move(left).error();
}

// The half of the one that comes.
Result<SleepReport> SleepController::take_now(const WakeOptions& options) {
  if (!options.tags.empty() || !options.from_checkpoint.empty() || options.catch_up || options.hold || options.early ||
      options.old_kv != OldKv::kUnsaid) {
    return Error{.code = Code::kInvalidArgument,
                 .what = "swap: memory is taken by a wake of all that sleeps in this process",
                 .next_step = "ask for nothing else"};
  }
  TORPOR_ASSIGN(const std::unique_ptr<SwapChannel> room, SwapChannel::open(options.swap_in_from));
  const auto watched = ProgressFile::of_caller(options.progress);
  const auto go_on = [&] { return watched == nullptr ? ok() : watched->check(); };
  Result<SleepReport> woken = catching([&]() -> Result<SleepReport> {
    TORPOR_ASSIGN(const size_t ranks, may_come());
    TORPOR_TRY(room->join(SwapChannel::Side::kTakes, ranks));
    TORPOR_TRY(room->wait_for(SwapChannel::Stage::kReady, go_on));
    const Exchange other{.room = options.swap_in_from,
                         .settle = [&]() -> Status {
                           room->say(SwapChannel::Stage::kReady);
                           TORPOR_TRY(room->wait_for(SwapChannel::Stage::kDone));
                           return room->say(SwapChannel::Stage::kReady), ok();  // a sign
                         },
                         .commit = [&] { return room->commit(); }};
    TORPOR_ASSIGN(SleepReport report, wake_now({.progress = options.progress}, &other));
    if (!report.changed) return cannot(fmt::format("the engine that is to come: {}", report.note), "");
    return report;
  });
  if (woken) return room->say(SwapChannel::Stage::kDone), std::move(woken);
  (void)room->stop(SwapChannel::Side::kTakes);
  room->say(lost() ? SwapChannel::Stage::kLost : SwapChannel::Stage::kFailed);
  Error error = std::move(woken).error();
  (void)catching([&]() -> Status { return error.what = fmt::format("swap: {}", error.what), ok(); });
  return error;
}

Result<SwapReport> SleepController::leave(const SleepOptions& asked, const OtherEngine& other) {
  const std::chrono::nanoseconds began = clock_.now();
  memory_comes_late_ = false;
  Gone gone = Gone::kNo;
  Result<SwapReport> swapped = catching([&]() -> Result<SwapReport> {
    if (!operation_mutex_.try_lock()) return busy();
    const MutexLock in_progress(operation_mutex_, std::adopt_lock);
    return go_for(asked, other, gone);
  });
  if (swapped) {
    swapped->seconds = seconds_between(began, clock_.now());
    return swapped;
  }
  Error error = std::move(swapped).error();
  Status woken;
  if (gone == Gone::kMayReturn) {
    // All of it is in host memory. The other one has given back what it had, unless it is lost or gives no sign.
    woken = catching([&] {
      return while_memory_comes([&]() -> Status {
        TORPOR_TRY(wake_now({}));
        return ok();
      });
    });
  }
  const bool stays = gone == Gone::kStays || (gone == Gone::kMayReturn && !woken);
  error.state_changed = lost() || stays;
  (void)catching([&]() -> Status {
    error.what = fmt::format("swap: {}", error.what);
    if (stays) error.what += "; the engine that went stays asleep";
    if (!woken) error.what += fmt::format(": {}", woken.error().to_string());
    return ok();
  });
  return error;
}

Result<SwapReport> SleepController::go_for(const SleepOptions& asked, const OtherEngine& other, Gone& gone) {
  TORPOR_TRY(may_begin());
  if (is_sleeping()) return cannot("the engine that is to go is asleep", "wake the other one without it");
  TORPOR_TRY(other.admit());
  TORPOR_TRY(wait_for_late());
  settle_behind("a swap was asked for");
  FallingAsleep sleep(*this, "sleep", asked);
  set_state(State::kFallingAsleep);
  Status ready = catching([&]() TORPOR_REQUIRES(operation_mutex_) { return make_ready(sleep); });
  if (!ready) return undone(sleep, "sleep", std::move(ready).error());
  Result<SleepReport> woken = catching([&] { return other.exchange(sleep, gone); });
  if (woken) return SwapReport{.slept = std::move(sleep.report), .woken = std::move(*woken)};
  if (!is_in(State::kAsleep)) return undone(sleep, "sleep", std::move(woken).error());
  if (gone == Gone::kNo) gone = Gone::kMayReturn;
  return std::move(woken).error();
}

// Whether this engine can be the one that comes, and how many ranks it has.
Result<size_t> SleepController::may_come() {
  const ControllerState own = state();
  if (own.engine != "asleep") return cannot(fmt::format("the engine that is to come is {}", own.engine), "");
  if (own.level < 1) return cannot("the engine that is to come is only paused", "wake it without the other");
  if (!operation_mutex_.try_lock()) return busy();
  const MutexLock in_progress(operation_mutex_, std::adopt_lock);
  if (!empty_.empty())
    return cannot(fmt::format("the engine that is to come has not kept its {}", joined(empty_, ", ")),
                  "load them in a wake of its own");
  return count_ranks();
}

Result<size_t> SleepController::count_ranks() {
  TORPOR_ASSIGN(const Described described, ranks_.call(orders::Describe{}));
  return described.size();
}

// All that comes before bytes are copied.
Status SleepController::make_ready(FallingAsleep& sleep) {
  sleep.report.level = sleep.options.level;
  sleep.report.to = "host";
  TORPOR_TRY(admit(sleep));
  TORPOR_TRY(quiesce(sleep));
  TORPOR_TRY(prepare(sleep));
  TORPOR_TRY(sleep.operation.go_on());
  return release(sleep);
}

// Before anybody takes: what will be given.
Status SleepController::promise(FallingAsleep& sleep, SwapChannel& room, const std::string& path) {
  sleep.save.room = path;
  for (size_t rank = 0; rank < sleep.described.size(); ++rank) {
    uint64_t bytes = 0;
    for (const std::string& tag : sleep.tags) {
      const auto found = sleep.described[rank].ledger.tags.find(tag);
      if (found != sleep.described[rank].ledger.tags.end()) bytes += found->second.physical_bytes;
    }
    TORPOR_TRY(room.promise(rank, bytes));
  }
  return ok();
}

// Copies, and gives. Throws nothing: a thread ends with it.
Status SleepController::give(FallingAsleep& sleep, SwapChannel& room, bool& failed_first) {
  Status given = catching([&] { return save(sleep); });  // moved from here: a copy takes memory
  if (given) {
    room.end();
  } else {
    failed_first = room.stop();
  }
  return given;
}

Result<SleepReport> SleepController::exchange(FallingAsleep& sleep, SleepController& to) {
  TORPOR_ASSIGN(const std::unique_ptr<Room> room, Room::make());
  TORPOR_TRY(promise(sleep, *room->file, room->path));
  Status given = ok();
  bool failed_first = false;
  std::thread giver;  // copies; all that touches the engines stays on this one
  const Exchange other{.room = room->path, .settle = [&]() TORPOR_REQUIRES(operation_mutex_) -> Status {
                         giver.join();
                         TORPOR_TRY(given);
                         return let_go(sleep);
                       }};
  giver = std::thread([&] { given = give(sleep, *room->file, failed_first); });  // nothing may throw until it is joined
  Result<SleepReport> woken = catching([&] { return to.wake_now({}, &other); });
  if (giver.joinable()) {
    (void)room->file->stop();
    giver.join();
  }
  if (failed_first) return given.error();
  if (woken && !woken->changed) return cannot(fmt::format("the engine that is to come: {}", woken->note), "");
  return woken;
}

// From when this one is asleep it looks at nothing but the end of the other, which may run by then.
Result<SleepReport> SleepController::exchange_by_file(FallingAsleep& sleep, SwapChannel& room, Gone& gone) {
  bool only_waits = false;  // all is saved, and given
  Status given = catching([&]() TORPOR_REQUIRES(operation_mutex_) -> Status {
    TORPOR_TRY(promise(sleep, room, sleep.options.swap_out_to));
    room.say(SwapChannel::Stage::kReady);
    bool failed_first = false;
    TORPOR_TRY(give(sleep, room, failed_first));
    only_waits = true;
    TORPOR_TRY(room.wait_for(SwapChannel::Stage::kReady, [&] { return sleep.operation.go_on(); }));
    only_waits = false;
    return let_go(sleep);
  });
  if (given) {
    room.say(SwapChannel::Stage::kDone);
  } else {
    (void)room.stop();
  }
  const SwapChannel::End end = room.wait_for_end();
  if (given && end == SwapChannel::End::kRuns) return SleepReport{};
  memory_comes_late_ = end == SwapChannel::End::kMayHold || room.other_ended();
  if (given && end == SwapChannel::End::kMayRun) {
    gone = Gone::kStays;
    return Error{.code = Code::kTimeout,
                 .what = "the engine that came has not said that it runs, and gives no sign",
                 .next_step = "see whether it runs; if it has ended, wake this one"};
  }
  if (given) return room.stopped();
  if (only_waits && end == SwapChannel::End::kMayHold) {
    sleep.alone = true;
    (void)catching([&]() TORPOR_REQUIRES(operation_mutex_) { return let_go(sleep); });
  }
  return std::move(given).error();
}

// What went is there again. The other engine has none of it any more.
Status SleepController::take_back(FallingAsleep& sleep) {
  return while_memory_comes([&]() -> Status {
    TORPOR_TRY(ranks_.undo(orders::TakeBack{.tags = sleep.save.tags}));
    return ok();
  });
}

// What a process had is free some time after its end.
Status SleepController::while_memory_comes(const std::function<Status()>& attempt) {
  const std::chrono::nanoseconds began = clock_.now();
  while (true) {
    const Status done = attempt();
    if (done || done.error().code != Code::kResourceExhausted || !memory_comes_late_) return done;
    if (clock_.now() - began > kMemoryComes) return done;
    std::this_thread::sleep_for(kLookAgain);
  }
}

Status SleepController::exchanged(const Exchange* exchange, const SleepReport& report) {
  if (exchange == nullptr) return ok();
  if (!report.reload.empty()) return cannot("the engine that is to come has no weights", "wake it without the other");
  return exchange->settle();
}

Status SleepController::committed(const Exchange* exchange) {
  return exchange == nullptr || !exchange->commit ? ok() : exchange->commit();
}

}  // namespace torpor
