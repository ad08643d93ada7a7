// SPDX-License-Identifier: Apache-2.0
// Rolling forward: from the state of a checkpoint, or of an empty engine, to the state that lets each request go on
// from what its reader was given since.
//
// Tokens that were given are never drawn again: they are appended to the request, and the engine computes their KV as
// it would that of a prompt. Requests that began since come in as preempted ones: their prompt and tokens are computed
// anew.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/engine_checkpoint.h"
#include "engine/delivery/answer.h"

namespace torpor {

struct RolledForward {
  std::vector<std::string> extended;  // were given more tokens than the state has
  std::vector<std::string> added;     // began after it, or took another course than it
  std::vector<std::string> dropped;   // have ended since, or are of nobody's interest any more
};

// `answers` in the order of their start; those that the state does not know and that have ended mean nothing. Requests
// of which the state has more tokens stay as they are; so do those without an answer, unless `forgotten`: the state was
// gone on with before, so that their answers have ended and were forgotten. The result is valid().
Result<RolledForward> roll_forward(SchedulerCheckpoint& state, std::span<const Answer> answers, bool forgotten);

// The same for a wake (engine/sleep_report.h: WakeOptions::catch_up). `rolled` receives what was done, and outlives it.
std::function<Status(SchedulerCheckpoint& state, bool woken_before)> catch_up_with(std::vector<Answer> answers,
                                                                                   RolledForward& rolled);

}  // namespace torpor
