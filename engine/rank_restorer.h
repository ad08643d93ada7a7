// SPDX-License-Identifier: Apache-2.0
// RankRestorer: copies what was saved of a rank back into its device memory.
//
// A full wake, a post-copy wake, a wake from a checkpoint and a swap-in differ in three points: the gate that waits
// for the memory (engine/restore_gate.h), the source of the bytes, and the deferred blocks. The engine runs
// before deferred blocks are there; they are copied while it runs (engine/deferred_copies.h). The controller chooses
// them (orders::Restore::deferred).
//
// Owner: RankMemory. Threads: the caller holds RankMemory's lock.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/swap_channel.h"
#include "engine/chunk_restorer.h"
#include "engine/deferred_copies.h"
#include "engine/rank_orders.h"
#include "engine/rank_parts.h"
#include "engine/region_images.h"
#include "engine/restore_gate.h"

namespace torpor {

class RankRestorer {
 public:
  RankRestorer(const RankParts& parts, RegionImages& images) : parts_(parts), images_(images) {}  // both outlive it

  // Attach the tags' regions and copy their images into them. Deferred blocks begin to be copied.
  Result<orders::Restore::Reply> restore(const orders::Restore& order);
  // Copy KV blocks of a committed checkpoint into attached memory. Deferred blocks begin to be copied.
  Result<orders::Restore::Reply> load_blocks(const orders::Restore& order);
  // End the wake of these tags (RegionImages::finish()). The image of deferred blocks stays until all have ended and
  // were reported.
  Status finish(const std::vector<std::string>& tags, bool keep);

  // Return the deferred blocks that have ended since those that the controller has seen.
  orders::PollRestore::Reply poll(const orders::PollRestore& order);
  Status nothing_deferred() const;                        // kFailedPrecondition while blocks are deferred
  void cancel_deferred() noexcept { deferred_.reset(); }  // stops all copies; the image stays
  void end_deferred() noexcept;                           // stops all copies and drops the image

 private:
  struct Source {
    RecordStore& tier;
    std::span<const SavedChunk> chunks{};
    bool in_turn = false;  // staging memory is short: one job at a time
  };
  struct Deferred {
    std::shared_ptr<RecordStore> disk{};  // source of the blocks, if it is not an image
    std::vector<DeferredCopies::Part> parts{};
    uint64_t bytes = 0;
    bool of_image = false;
    bool keep = false;                         // keep the image: finish()'s argument
    uint64_t foreign_writes = 0;               // RegionImages::foreign_block_writes() at finish()
    std::unique_ptr<DeferredCopies> blocks{};  // last member: it ends first
  };

  Result<std::unique_ptr<RestoreGate>> gate_of(const std::vector<std::string>& tags, SwapChannel* channel) const;
  Status restore_image(TagImage& image, const std::vector<int32_t>& deferred_numbers, ChunkRestorer& copier,
                       Deferred& deferred) const;
  Status copy(const Source& from, const std::vector<int32_t>& deferred_numbers, ChunkRestorer& copier,
              Deferred& deferred) const;
  Status add_deferred(std::vector<SavedChunk> chunks, const Source& from, Deferred& deferred) const;
  uint64_t begin_deferred(Deferred deferred);

  const RankParts& parts_;
  RegionImages& images_;
  std::unique_ptr<Deferred> deferred_;  // null: no block is deferred
};

}  // namespace torpor
