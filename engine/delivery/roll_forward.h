// SPDX-License-Identifier: Apache-2.0
// Rolling forward: changes the state of a checkpoint, or of an empty engine, so that each request goes on from what was
// delivered to its reader since.
//
// Delivered tokens are never sampled again: they are appended to the request, and the engine computes their KV like
// that of a prompt. Requests that began later are added as preempted ones: their prompt and tokens are computed anew.
// So are those that got tokens, for an engine that cannot go on from a request's state as from that of a prompt.
//
// Owner: none, these are functions. Threads: any. Failure: errors are values.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/engine_checkpoint.h"
#include "engine/delivery/answer.h"

namespace torpor {

struct RolledForward {
  std::vector<std::string> extended;  // got tokens that the state did not have
  std::vector<std::string> added;     // began after the state, or continue differently from it
  std::vector<std::string> dropped;   // have ended since, or nobody waits for them any more
};

// Roll `state` forward. `answers`: in the order of their start; ended answers that the state does not know are ignored.
// A request of which the state has more tokens than the answer stays as it is. A request without an answer stays, too,
// unless `forgotten`: an engine has gone on from this state before, so the answer has ended and was forgotten. The
// result is valid().
// `may_extend`: whether the engine computes what was appended on top of what a request had.
Result<RolledForward> roll_forward(CapturedState& state, std::span<const Answer> answers, bool forgotten,
                                   bool may_extend = true);

// Return a function that does that in a wake (WakeOptions::catch_up, engine/sleep_report.h). It writes what it did into
// `rolled`, which outlives it.
std::function<Status(CapturedState& state, bool woken_before)> catch_up_with(std::vector<Answer> answers,
                                                                             RolledForward& rolled,
                                                                             bool may_extend = true);

}  // namespace torpor
