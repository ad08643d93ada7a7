// SPDX-License-Identifier: Apache-2.0
// CheckpointSaver: saves the tags of a rank into a checkpoint under construction: at once while the engine stands
// still, or in stages while it serves (engine/background_writer.h). Chunks that the checkpoint before has are linked,
// and not read.
//
// Owner: RankSaver. Threads: the caller holds RankMemory's lock.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "engine/background_writer.h"
#include "engine/checkpoint_plan.h"
#include "engine/rank_orders.h"
#include "engine/rank_parts.h"
#include "engine/region_images.h"

namespace torpor {

class CheckpointSaver {
 public:
  CheckpointSaver(const RankParts& parts, RegionImages& images) : parts_(parts), images_(images) {}  // both outlive it

  // Write a file that shows that this rank sees the directory (checkpoint/rank_writer.h).
  Result<orders::WriteTestFile::Reply> write_test_file(const orders::WriteTestFile& order) const;
  // Copy the tags' content into images in the checkpoint. After an error call RegionImages::forget_saved().
  Result<orders::Save::Reply> save(const orders::Save& order);
  // Return the reply that save() would give. Nothing changes.
  Result<orders::Save::Reply> plan(const orders::Save& order) const;

  // The stages of a checkpoint that is written while the engine serves (orders::Save::Stage). There is one at a time.
  // open() takes the digests of the weights and of `named_weights` in the background; take_named_digest() has the
  // second one after stop_and_copy().
  Result<orders::Save::Reply> open(const orders::Save& order, std::vector<ChunkPlan> named_weights);
  Result<orders::Save::Reply> precopy(const orders::Save& order);
  Result<orders::Save::Reply> stop_and_copy(const orders::Save& order);
  std::optional<std::string> take_named_digest() { return writer_ ? writer_->take_named_digest() : std::nullopt; }
  Result<orders::PollSave::Reply> poll(const orders::PollSave& order);
  void stop() noexcept { writer_.reset(); }  // ends it; when this returns, nothing reads the tags' memory any more

 private:
  Status write(CheckpointPlan& plan, std::span<const size_t> places, RankWriter& writer) const;
  Result<BackgroundWriter*> writer_of(const orders::Save& save);
  Result<CheckpointPlan> plan_serving(const orders::Save& save, const std::vector<BlockContent>& contents,
                                      BackgroundWriter& background);

  const RankParts& parts_;
  RegionImages& images_;
  std::unique_ptr<BackgroundWriter> writer_;  // null: no checkpoint is being written in stages
  uint64_t foreign_writes_ = 0;               // RegionImages::foreign_block_writes() when writer_ last read blocks
};

}  // namespace torpor
