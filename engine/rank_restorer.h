// SPDX-License-Identifier: Apache-2.0
// RankRestorer: brings what was saved of a rank back into its device memory.
//
// A whole wake, an early one, one from a checkpoint and a swap differ in what says that memory is there
// (engine/restore_gate.h), in the source of the bytes, and in the deferred blocks: the engine runs before those
// are there, and they are copied behind it (engine/deferred_copies.h). Which these are the controller decides
// (orders::Restore::deferred).
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
#include "engine/deferred_copies.h"
#include "engine/rank_orders.h"
#include "engine/rank_parts.h"
#include "engine/region_images.h"
#include "engine/restore_gate.h"

namespace torpor {

class RankRestorer {
 public:
  RankRestorer(const RankParts& parts, RegionImages& images) : parts_(parts), images_(images) {}  // both outlive it

  // Attach the tags' regions and copy their images up, but for deferred blocks, which begin to come.
  Result<orders::Restore::Reply> restore(const orders::Restore& order);
  // Copy KV blocks of a committed checkpoint into attached memory, but for deferred ones, which begin to come.
  Result<orders::Restore::Reply> load_blocks(const orders::Restore& order);
  // The tags are awake (RegionImages::finish()). The image of deferred blocks stays until all have ended and were told.
  Status finish(const std::vector<std::string>& tags, bool keep);

  // Return which deferred blocks have ended since the controller heard of them.
  orders::PollRestore::Reply poll(const orders::PollRestore& order);
  Status nothing_deferred() const;                        // kFailedPrecondition while some are
  void cancel_deferred() noexcept { deferred_.reset(); }  // nothing is written any more; the image stays
  void end_deferred() noexcept;                           // the same, and the image goes

 private:
  struct Source {
    RecordStore& tier;
    std::span<const SavedChunk> chunks{};
    bool in_turn = false;  // staging memory is short: one job at a time
  };
  struct Deferred {
    std::shared_ptr<RecordStore> disk{};  // they come from, if it is not an image's
    std::vector<DeferredCopies::Part> parts{};
    uint64_t bytes = 0;
    bool of_image = false;
    bool keep = false;                         // the image, as finish() was told
    uint64_t foreign_writes = 0;               // RegionImages::foreign_block_writes() then
    std::unique_ptr<DeferredCopies> blocks{};  // last: it ends first
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
  std::unique_ptr<Deferred> deferred_;  // null: none are
};

}  // namespace torpor
