// SPDX-License-Identifier: Apache-2.0
// The half of the engine that goes in a swap: it saves, gives its memory page by page, and falls asleep, while another
// engine takes the memory and wakes.
//
// In this order: the one that goes stands still and is captured; then, at once, it is copied and gives its memory, and
// the other takes it. When all is copied and gone, the first is asleep, and only then may the other run and its backup
// go. So what fails before is undone: first the other one gives back what it has, then the first takes it.
//
// Engines of two processes do the same, each its half, and say in a SwapChannel how far they are.
#pragma once

#include <cstdint>
#include <functional>

#include "base/swap_channel.h"
#include "engine/sleep_operation.h"
#include "engine/wake_operation.h"

namespace torpor {

// The state of the engine that goes after a failed swap.
enum class SwappedOut : uint8_t {
  kAwake,              // it never was asleep, or is awake again
  kAsleepOtherEnded,   // it is asleep, and the other one does not run
  kAsleepOtherMayRun,  // it is asleep, and the other one may run
};

// How a swap-out ended that failed.
struct SwapOutEnd {
  SwappedOut state = SwappedOut::kAwake;
  bool memory_comes_late = false;  // the process that had the memory has ended, perhaps just now
};

// Stands in for the path of a SwapChannel where both engines are in this process: swap_out_here() makes one.
inline constexpr const char* kThisProcess = "this process";

// Swap with an engine of this process: `wake` wakes it. Copies have a thread of their own; all that touches the engines
// stays on the caller's. After an error the other engine has none of the memory any more.
Result<SleepReport> swap_out_here(SleepOperation& sleep, const std::function<Result<SleepReport>(const SwapIn&)>& wake);
// Swap with an engine of another process, at the other end of `channel`, whose path is `path`. After an error it has
// none of the memory any more, or gives no sign.
Result<SleepReport> swap_out_to(SleepOperation& sleep, SwapChannel& channel, const std::string& path, SwapOutEnd& end);

}  // namespace torpor
