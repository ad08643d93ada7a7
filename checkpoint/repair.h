// SPDX-License-Identifier: Apache-2.0
// Repair: makes a new checkpoint from a damaged one, with the requests that are intact.
//
// If a block of a request is damaged on any rank, the request is dropped. Damaged cached blocks lose their hash. If
// saved memory of a tag other than KV is damaged, the whole tag is dropped: a new engine does not need it to wake. A
// damaged manifest, section or refs file cannot be repaired, because nothing then says which bytes belong to which
// request.
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
  EngineCheckpoint state;  // the remaining state; valid
  std::vector<DroppedRequest> dropped_requests;
  std::vector<int32_t> dropped_blocks;    // damaged ones, by number
  std::vector<std::string> dropped_tags;  // tags whose saved memory is dropped
};

// Decide what to drop; changes nothing. kCorruption: the checkpoint cannot be repaired.
Result<RepairPlan> plan_repair(const Checkpoint& checkpoint, const Verification& found);
// Remove a request from all values that name it; its blocks become free.
void drop_request(CapturedState& state, const std::string& id);

// Write what `plan` keeps of `checkpoint` as a new generation of `target`. Return its path. The damaged checkpoint is
// not removed, because it may still be needed.
Result<std::string> write_repaired(const Checkpoint& checkpoint, const RepairPlan& plan, CheckpointManager& target);

}  // namespace torpor
