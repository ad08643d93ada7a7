// SPDX-License-Identifier: Apache-2.0
// The half of a swap that falls asleep: it saves, releases its memory page by page, and falls asleep, while another
// engine acquires the memory and wakes.
//
// The order is this. The engine that falls asleep is stopped and captured. Then its content is copied and its
// memory released, while the other engine acquires it. When all is copied and released, the first engine is asleep.
// Only then may the other engine run and its backup be dropped. A failure before that is undone: the other engine
// releases what it has acquired, then the first one takes it back.
//
// Engines of two processes each do their half, and publish their stages in a SwapChannel.
//
// Owner: none, these are functions. Threads: the caller's, and one for copies within one process.
#pragma once

#include <cstdint>
#include <functional>

#include "base/swap_channel.h"
#include "engine/sleep_operation.h"
#include "engine/wake_operation.h"

namespace torpor {

// The state of the engine that should have fallen asleep, after a failed swap.
enum class SwappedOut : uint8_t {
  kAwake,              // it was never asleep, or is awake again
  kAsleepOtherEnded,   // it is asleep, and the other engine does not run
  kAsleepOtherMayRun,  // it is asleep, and the other engine may run
};

// The end of a swap-out that failed.
struct SwapOutEnd {
  SwappedOut state = SwappedOut::kAwake;
  bool memory_comes_late = false;  // the process that acquired the memory has ended, perhaps just now
};

// Stands in a SwapIn for the path of a SwapChannel if both engines are in this process: swap_out_here() makes the
// channel.
inline constexpr const char* kThisProcess = "this process";

// Swap with an engine of this process, which `wake` wakes. A thread of its own sends the order to copy
// (EngineHooks::call_ranks of the engine that falls asleep); all other hooks are called on the caller's thread. After
// an error the other engine has none of the memory any more.
Result<SleepReport> swap_out_here(SleepOperation& sleep, const std::function<Result<SleepReport>(const SwapIn&)>& wake);
// Swap with an engine of another process, at the other end of `channel`; `path` is its path. After an error that engine
// has none of the memory any more, or its heartbeats have stopped.
Result<SleepReport> swap_out_to(SleepOperation& sleep, SwapChannel& channel, const std::string& path, SwapOutEnd& end);

}  // namespace torpor
