// SPDX-License-Identifier: Apache-2.0
// RankRestorer: brings what was saved of a rank back into its device memory.
//
// A whole wake, an early one, one from a checkpoint and a swap differ in what says that memory is there
// (engine/restore_gate.h), in the source of the bytes, and in the blocks that come late: the engine runs before those
// are there, and they are copied behind it (engine/late_blocks.h). Which these are the controller decides
// (orders::Restore::late).
//
// Owner: RankMemory; its lock is held at every call.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/swap_channel.h"
#include "engine/chunk_restorer.h"
#include "engine/late_blocks.h"
#include "engine/rank_orders.h"
#include "engine/rank_parts.h"
#include "engine/region_images.h"
#include "engine/restore_gate.h"

namespace torpor {

class RankRestorer {
 public:
  RankRestorer(const RankParts& parts, RegionImages& images) : parts_(parts), images_(images) {}  // both outlive it

  // Attach the tags' regions and copy their images up, but for late blocks, which begin to come.
  Result<orders::Restore::Reply> restore(const orders::Restore& order);
  // Copy KV blocks of a committed checkpoint into attached memory, but for late ones, which begin to come.
  Result<orders::Restore::Reply> load_blocks(const orders::Restore& order);
  // The tags are awake (RegionImages::finish()). The image of late blocks stays until all have ended and were told.
  Status finish(const std::vector<std::string>& tags, bool keep);

  // Return which late blocks have ended since the controller heard of them.
  orders::PollRestore::Reply poll(const orders::PollRestore& order);
  Status nothing_late() const;                    // kFailedPrecondition while some are
  void cancel_late() noexcept { late_.reset(); }  // nothing is written any more; the image stays
  void end_late() noexcept;                       // the same, and the image goes

 private:
  struct Source {
    RecordStore& tier;
    std::span<const SavedChunk> chunks{};
    bool in_turn = false;  // staging memory is short: one job at a time
  };
  struct Late {
    std::shared_ptr<RecordStore> disk{};  // they come from, if it is not an image's
    std::vector<LateBlocks::Part> parts{};
    uint64_t bytes = 0;
    bool of_image = false;
    bool keep = false;                     // the image, as finish() was told
    uint64_t foreign_writes = 0;           // RegionImages::foreign_block_writes() then
    std::unique_ptr<LateBlocks> blocks{};  // last: it ends first
  };

  Result<std::unique_ptr<RestoreGate>> gate_of(const std::vector<std::string>& tags, SwapChannel* channel) const;
  Status restore_image(TagImage& image, const std::vector<int32_t>& late_numbers, ChunkRestorer& copier,
                       Late& late) const;
  Status copy(const Source& from, const std::vector<int32_t>& late_numbers, ChunkRestorer& copier, Late& late) const;
  Status add_late(std::vector<SavedChunk> chunks, const Source& from, Late& late) const;
  uint64_t begin_late(Late late);

  const RankParts& parts_;
  RegionImages& images_;
  std::unique_ptr<Late> late_;  // null: none are
};

}  // namespace torpor
