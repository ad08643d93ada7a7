// SPDX-License-Identifier: Apache-2.0
// ArenaPlan: what a sleep into host memory does with each of its tags: which chunks are copied, which bytes are in host
// memory already, and what goes to a file because the arena has no room for it.
//
// Owner: one order to a rank. Threads: RankMemory's lock is held at every call.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/packed_shares.h"
#include "engine/rank_orders.h"
#include "engine/rank_parts.h"
#include "engine/region_images.h"
#include "engine/tag_image.h"

namespace torpor {

class ArenaPlan {
 public:
  struct Tag {
    std::string tag;
    uint64_t clean_bytes = 0;              // its image holds: nothing is to be done
    std::vector<ChunkPlan> copied{};       // from device memory, the most needed first
    std::vector<BlockContent> contents{};  // of these, where they are blocks
    size_t in_host = 0;                    // of them have room in the arena
    uint64_t reused_bytes = 0;             // of retained blocks that are taken over
    uint64_t retained_bytes = 0;           // of the arena, that these have
    uint64_t borrowed_bytes = 0;           // of blocks that the host store has
    TagImage image{};                      // with Take::kNow: what was taken over and borrowed
    std::vector<SavedChunk> spilled{};     // where those of `copied` are that have no room

    bool clean() const { return clean_bytes != 0; }
    uint64_t unread_bytes() const { return clean_bytes + reused_bytes + borrowed_bytes; }
    uint64_t spilled_bytes() const;
  };
  enum class Take : uint8_t {
    kNothing,  // the plan says what would be done
    kNow,      // retained blocks that still hold are in the images, and the others are gone
  };

  // Ask the index who has the bytes of each chunk. All arguments outlive the result. kIncompatible: a block that does
  // not exist. kCorruption: an order that does not fit together.
  static Result<ArenaPlan> of(const RankParts& parts, const RegionImages& images, const PackedShares& shares,
                              const orders::Save& order, Take take);

  std::vector<Tag>& tags() { return tags_; }
  // Fill in_host, in the order of need: all that has room in the arena. `freed`: bytes in use now that will be free;
  // `reserved`: bytes to leave free.
  void fit(uint64_t freed, uint64_t reserved);
  // Return the staging memory of each batch of this sleep, and of its wake; 0 where chunks need none. Before the images
  // are taken out of the plan.
  uint64_t batch_staging() const;
  // Return how many bytes of the arena all copied chunks take.
  uint64_t arena_bytes() const;
  // Return how much of the arena is needed to bring back spilled chunks of so many bytes in all, each in pages.
  uint64_t spill_staging(uint64_t padded_bytes, uint64_t largest) const;

 private:
  ArenaPlan(const RankParts& parts, const RegionImages& images, const PackedShares& shares)
      : parts_(&parts), images_(&images), shares_(&shares) {}
  Status add_blocks(Tag& tag, const orders::Save& order, Take take) const;
  bool can_borrow(const Tag& tag, const HostStore::Stored& stored) const;
  void borrow(Tag& tag, const HostStore::Stored& stored, int32_t block, const std::shared_ptr<HostStore>& store) const;
  uint64_t room_for(const Tag& tag, const ChunkPlan& chunk) const;

  const RankParts* parts_;
  const RegionImages* images_;
  const PackedShares* shares_;
  std::vector<Tag> tags_;
};

}  // namespace torpor
