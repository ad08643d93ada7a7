// SPDX-License-Identifier: Apache-2.0
// Repair: from a damaged checkpoint a new one with the requests that are whole.
//
// A request goes if a block of its is damaged on some rank. Cached blocks that are damaged lose their hash. A tag whose
// saved memory is damaged, other than KV, goes whole: waking in a new engine does not need it. What cannot be repaired:
// a damaged manifest or section, or refs, as nothing then says what belongs to whom.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/checkpoint_manager.h"
#include "checkpoint/verify.h"

namespace torpor {

struct DroppedRequest {
  std::string id;
  std::string why;
};

struct RepairPlan {
  EngineCheckpoint state;  // what is left; valid
  std::vector<DroppedRequest> dropped_requests;
  std::vector<int32_t> dropped_blocks;    // damaged ones, by number
  std::vector<std::string> dropped_tags;  // whose saved memory goes
};

// Decides only. kCorruption: it cannot be repaired.
Result<RepairPlan> plan_repair(const Checkpoint& checkpoint, const Verification& found);
// Takes a request out of everything that names it; its blocks become free.
void drop_request(SchedulerCheckpoint& state, const std::string& id);

// Writes what `plan` leaves of `checkpoint` as a new generation of `target`; returns its path. Nothing is
// taken away: what is damaged may be wanted again.
Result<std::string> write_repaired(const Checkpoint& checkpoint, const RepairPlan& plan, CheckpointManager& target);

}  // namespace torpor
