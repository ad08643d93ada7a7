// SPDX-License-Identifier: Apache-2.0
#include "engine/swap_out.h"

#include <thread>

#include <fmt/core.h>

#include "base/shared_folder.h"

namespace torpor {
namespace {

// A SwapChannel in a folder of its own; the destructor removes both.
struct OwnChannel {
  static Result<std::unique_ptr<OwnChannel>> make() {
    auto own = std::make_unique<OwnChannel>();
    TORPOR_ASSIGN_OR_RETURN(own->folder, SharedFolder::make());
    own->path = fmt::format("{}/room", own->folder->path());
    TORPOR_ASSIGN_OR_RETURN(own->channel,
                            SwapChannel::create(own->path, SwapChannel::kNoBound));  // no side waits for a process
    return own;
  }
  std::unique_ptr<SharedFolder> folder;
  std::string path;
  std::unique_ptr<SwapChannel> channel;
};

// Publish how many bytes will be released, before the other side acquires any.
Status promise(const SleepOperation& sleep, SwapChannel& channel) {
  const std::vector<uint64_t> bytes = sleep.bytes_by_rank();
  for (size_t rank = 0; rank < bytes.size(); ++rank) TORPOR_RETURN_IF_ERROR(channel.supply(rank, bytes[rank]));
  return ok();
}

// Copy, and release. It never throws, as it ends a thread.
Status give(SleepOperation& sleep, SwapChannel& channel, const std::string& path, bool& failed_first) {
  Status given = try_catch([&] { return sleep.save_for_swap(path); });  // moved from here, as a copy would allocate
  if (given) {
    channel.end();
  } else {
    failed_first = channel.stop();
  }
  return given;
}

}  // namespace

Result<SleepReport> swap_out_here(SleepOperation& sleep,
                                  const std::function<Result<SleepReport>(const SwapIn&)>& wake) {
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<OwnChannel> own, OwnChannel::make());
  SwapChannel& channel = *own->channel;
  TORPOR_RETURN_IF_ERROR(promise(sleep, channel));
  Status given = ok();
  bool failed_first = false;
  std::thread giver;
  const SwapIn other{.channel = own->path, .wait_until_asleep = [&]() -> Status {
                       giver.join();
                       TORPOR_RETURN_IF_ERROR(given);
                       return sleep.commit_sleep();
                     }};
  // Nothing may throw from here until the thread is joined.
  giver = std::thread([&] { given = give(sleep, channel, own->path, failed_first); });
  Result<SleepReport> woken = try_catch([&] { return wake(other); });
  if (giver.joinable()) {
    (void)channel.stop();
    giver.join();
  }
  if (failed_first) return given.error();
  if (woken && !woken->changed)
    return Error{.code = Code::kFailedPrecondition, .what = fmt::format("the engine that is to come: {}", woken->note)};
  return woken;
}

// Once this engine is asleep it only waits for the end of the other engine, which may run by then.
Result<SleepReport> swap_out_to(SleepOperation& sleep, SwapChannel& channel, const std::string& path,
                                SwapOutEnd& swapped) {
  bool only_waits = false;  // all is saved and released
  Status given = try_catch([&]() -> Status {
    TORPOR_RETURN_IF_ERROR(promise(sleep, channel));
    channel.reach(SwapChannel::Stage::kReady);
    bool failed_first = false;
    TORPOR_RETURN_IF_ERROR(give(sleep, channel, path, failed_first));
    only_waits = true;
    TORPOR_RETURN_IF_ERROR(channel.wait_for(SwapChannel::Stage::kReady, [&] { return sleep.operation().go_on(); }));
    only_waits = false;
    return sleep.commit_sleep();
  });
  if (given) {
    channel.reach(SwapChannel::Stage::kDone);
  } else {
    (void)channel.stop();
  }
  const SwapChannel::End end = channel.wait_for_end();
  if (given && end == SwapChannel::End::kRuns) return SleepReport{};
  swapped.memory_comes_late = end == SwapChannel::End::kMayHold || channel.other_ended();
  if (swapped.memory_comes_late) sleep.set_memory_comes_late();
  if (given && end == SwapChannel::End::kMayRun) {
    swapped.state = SwappedOut::kAsleepOtherMayRun;
    return Error{.code = Code::kTimeout,
                 .what = "the engine that came has not said that it runs, and sends no heartbeat",
                 .next_step = "see whether it runs; if it has ended, wake this one"};
  }
  if (given) return channel.stopped();
  if (only_waits && end == SwapChannel::End::kMayHold) {
    sleep.forbid_cancel();
    (void)try_catch([&] { return sleep.commit_sleep(); });
  }
  return std::move(given).error();
}

}  // namespace torpor
