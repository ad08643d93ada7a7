// SPDX-License-Identifier: Apache-2.0
// ArenaPlan: what a sleep into host memory does with each of its tags: which chunks it copies, which bytes are already
// in host memory, and which chunks go to a file because they do not fit into the arena.
//
// Owner: one order to a rank. Threads: the caller holds RankMemory's lock.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
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
    uint64_t clean_bytes = 0;              // bytes of a clean image, of which nothing is copied; 0: it is not clean
    std::vector<uint64_t> sizes{};         // bytes of each chunk to copy from device memory, the most needed first
    std::vector<ChunkPlan> copied{};       // with Take::kNow: these chunks
    std::vector<BlockContent> contents{};  // with Take::kNow: the content of each, if the tag has blocks
    size_t in_host = 0;                    // number of these chunks, from the first on, that fit into the arena
    uint64_t reused_bytes = 0;             // bytes of retained blocks that the image takes over
    uint64_t retained_bytes = 0;           // bytes of the arena that those blocks have
    uint64_t borrowed_bytes = 0;           // bytes of blocks that the host store has
    TagImage image{};                      // with Take::kNow: the blocks taken over and borrowed
    std::vector<SavedChunk> spilled{};     // the other chunks, as saved in the spill file

    bool clean() const { return clean_bytes != 0; }
    uint64_t unread_bytes() const { return clean_bytes + reused_bytes + borrowed_bytes; }
    uint64_t copied_bytes() const;
    uint64_t spilled_bytes() const;
  };
  enum class Take : uint8_t {
    kNothing,  // only plan
    kNow,      // move retained blocks that are still current into the images, and release the other ones
  };

  // Plan the sleep: ask the index where the bytes of each chunk are. All arguments outlive the result. kIncompatible: a
  // block of the order does not exist. kCorruption: the lists of the order do not fit together.
  static Result<ArenaPlan> of(const RankParts& parts, const RegionImages& images, const PackedShares& shares,
                              const orders::Save& order, Take take);

  std::vector<Tag>& tags() { return tags_; }
  // Set `in_host` of each tag, the most needed chunks first, until the arena is full. `freed`: bytes that are in use
  // now and will be free. `reserved`: bytes to leave free.
  void fit(uint64_t freed, uint64_t reserved);
  // Return the bytes of staging memory that each batch of this sleep, and of its wake, needs; 0 if no chunk needs
  // staging. Call it before the images are moved out of the plan.
  uint64_t batch_staging() const;
  // Return how many bytes of the arena all copied chunks take.
  uint64_t arena_bytes() const;
  // Return how many bytes of the arena the chunks that go there take at least.
  uint64_t least_bytes() const;
  // Return the bytes of the arena needed to bring back spilled chunks. `padded_bytes`: the size of all of them, each
  // rounded up to pages. `largest`: the size of the largest.
  uint64_t spill_staging(uint64_t padded_bytes, uint64_t largest) const;

 private:
  ArenaPlan(const RankParts& parts, const RegionImages& images, const PackedShares& shares)
      : parts_(&parts), images_(&images), shares_(&shares) {}
  Status add_blocks(Tag& tag, const orders::Save& order, Take take) const;
  std::vector<uint64_t> take_over(TagImage& image, std::span<const int32_t> blocks,
                                  std::span<const BlockContent> contents) const;
  bool can_borrow(const Tag& tag, const HostStore::Stored& stored) const;
  void borrow(Tag& tag, const HostStore::Stored& stored, int32_t block, const std::shared_ptr<HostStore>& store) const;
  uint64_t room_for(const Tag& tag, uint64_t bytes) const;

  const RankParts* parts_;
  const RegionImages* images_;
  const PackedShares* shares_;
  std::vector<Tag> tags_;
};

}  // namespace torpor
