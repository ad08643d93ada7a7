// SPDX-License-Identifier: Apache-2.0
// CheckpointSaver: saves the tags of a rank into a checkpoint under construction, at once while the engine stands
// still, or in parts while it serves (engine/write_behind.h). What the checkpoint before has already is linked, and not
// read.
//
// Owner: RankSaver; RankMemory's lock is held at every call.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "engine/checkpoint_plan.h"
#include "engine/rank_orders.h"
#include "engine/rank_parts.h"
#include "engine/region_images.h"
#include "engine/write_behind.h"

namespace torpor {

class CheckpointSaver {
 public:
  CheckpointSaver(const RankParts& parts, RegionImages& images) : parts_(parts), images_(images) {}  // both outlive it

  // Leave a sign that this rank sees the directory (checkpoint/rank_writer.h).
  Result<orders::LeaveSign::Reply> leave_sign(const orders::LeaveSign& order) const;
  // Content -> images in the checkpoint. After an error call RegionImages::forget_saved().
  Result<orders::Save::Reply> save(const orders::Save& order);
  // Return what save() would do.
  Result<orders::PlanSave::Reply> plan(const orders::Save& order) const;

  // A checkpoint that is written while the engine serves; one at a time.
  Result<orders::OpenBehind::Reply> open_behind(const orders::OpenBehind& order);
  Result<orders::CopyAhead::Reply> copy_ahead(const orders::CopyAhead& order);
  Result<orders::SaveBehind::Reply> save_behind(const orders::SaveBehind& order);
  Result<orders::LookBehind::Reply> look_behind(const orders::LookBehind& order);
  void stop_behind() noexcept { behind_.reset(); }  // nothing reads the tags' memory any more

 private:
  Status write(CheckpointPlan& plan, std::span<const size_t> places, RankWriter& writer) const;
  Result<WriteBehind*> behind_of(const orders::Save& save);
  Result<CheckpointPlan> plan_behind(const orders::Save& save, const std::vector<BlockContent>& contents,
                                     WriteBehind& behind) const;

  const RankParts& parts_;
  RegionImages& images_;
  std::unique_ptr<WriteBehind> behind_;  // null: none
};

}  // namespace torpor
