// SPDX-License-Identifier: Apache-2.0
#include "offload/outcome.h"

namespace torpor {

std::string_view name(BlockOutcome outcome) {
  switch (outcome) {
    case BlockOutcome::kTransferred: return "transferred";
    case BlockOutcome::kPresent: return "present";
    case BlockOutcome::kFiltered: return "filtered";
    case BlockOutcome::kPolicyTimeout: return "policy timeout";
    case BlockOutcome::kCancelled: return "cancelled";
    case BlockOutcome::kPreconditionFailed: return "precondition failed";
    case BlockOutcome::kEvicted: return "evicted";
    case BlockOutcome::kNoRoom: return "no room";
    case BlockOutcome::kQueueFull: return "queue full";
    case BlockOutcome::kDegraded: return "degraded";
    case BlockOutcome::kFailed: return "failed";
    case BlockOutcome::kUnproven: return "unproven";
    case BlockOutcome::kShutDown: return "shut down";
    case BlockOutcome::kDamaged: return "damaged";
    case BlockOutcome::kAbsent: return "absent";
  }
  return "failed";
}

}  // namespace torpor
