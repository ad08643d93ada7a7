// SPDX-License-Identifier: Apache-2.0
// What ContentIndex believes of bytes, and where it finds them.
#include "engine/content_index.h"

#include <cstring>

#include "allocator/host_device.h"
#include "base/units.h"
#include "engine/tags.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::value_of;

constexpr uint64_t kBlock = 4 * kKiB;

class ContentIndexTest : public ::testing::Test {
 protected:
  ContentIndexTest()
      : device_(value_of(make_host_device())),
        allocator_(value_of(SleepAllocator::create(*device_, {.handle_bytes = 64 * kKiB}))),
        arena_(value_of(HostArena::create({.budget_bytes = 64 * kKiB, .slab_bytes = 64 * kKiB}))),
        weights_(value_of(allocator_->allocate(kWeights, "w", 64 * kKiB))),
        index_(*device_, *allocator_, *arena_, 3 * kBlock) {}
  char* weights() { return reinterpret_cast<char*>(weights_); }  // NOLINT(performance-no-int-to-ptr)
  RetainedBlocks::Block block(int32_t number, uint64_t version) {
    return {.chunk = {.key = {.kind = ChunkKind::kKvBlock, .tag = "kv_cache", .index = static_cast<uint64_t>(number)},
                      .bytes = kBlock,
                      .stored_bytes = kBlock},
            .bytes = value_of(arena_->allocate(kBlock)),
            .content = {.version = version}};
  }
  void retain(std::initializer_list<std::pair<int32_t, uint64_t>> blocks) {
    std::vector<RetainedBlocks::Block> all;
    for (const auto& [number, version] : blocks) all.push_back(block(number, version));
    index_.retain(std::move(all));
  }
  const std::string kWeights = std::string(kWeightsTag);
  const std::unique_ptr<DeviceMemory> device_;
  const std::unique_ptr<SleepAllocator> allocator_;
  const std::unique_ptr<HostArena> arena_;
  const DeviceAddress weights_;
  ContentIndex index_;
  const std::vector<int32_t> blocks_{5, 6, 7};
  const std::vector<BlockContent> contents_{{.version = 50}, {.version = 60}, {.version = 70}};
};

TEST_F(ContentIndexTest, ABlockIsInTheArenaOnlyWithItsVersion) {
  retain({{5, 50}, {6, 61}});
  const HostPlaces places = index_.find_in_host(blocks_, contents_, {});
  EXPECT_EQ(places.retained_bytes[0], kBlock);
  EXPECT_EQ(places.retained_bytes[1], 0u);
  EXPECT_EQ(places.retained_bytes[2], 0u);
  EXPECT_TRUE(places.in_store.empty());
  std::vector<RetainedBlocks::Block> taken = index_.take_retained(blocks_, contents_);
  EXPECT_FALSE(taken[0].bytes.empty());
  EXPECT_TRUE(taken[1].bytes.empty() && taken[2].bytes.empty());
  EXPECT_EQ(index_.retained_bytes(), 0u);  // what had another version has gone
}

TEST_F(ContentIndexTest, AHostStoreIsAskedUntilItIsNotBelieved) {
  const std::shared_ptr<HostStore> store = value_of(HostStore::create(*arena_, {.slots = 2, .slot_bytes = kBlock}));
  index_.set_host_store(store);
  SavedChunk second{.bytes = kBlock, .offset = 1};
  std::memset(value_of(store->place(second)).data(), 'x', kBlock);
  ASSERT_SUCCEEDS(store->placed(1, {}));
  const std::vector<Slot> slots{-1, 1, 0};
  const HostPlaces places = index_.find_in_host(blocks_, contents_, slots);
  ASSERT_EQ(places.in_store.size(), 3u);
  ASSERT_TRUE(places.in_store[1]);
  EXPECT_EQ(places.in_store[1]->bytes[0], std::byte{'x'});
  EXPECT_FALSE(places.in_store[0] || places.in_store[2]);
  EXPECT_TRUE(index_.find_in_host(blocks_, contents_, {}).in_store.empty());
  index_.set_host_store({});
  EXPECT_TRUE(index_.find_in_host(blocks_, contents_, slots).in_store.empty());
}

TEST_F(ContentIndexTest, WhatIsRetainedGoesWhereTheArenaNeedsRoom) {
  retain({{5, 50}, {6, 60}, {7, 70}});
  EXPECT_EQ(index_.retained_bytes(), 3 * kBlock);
  const HostArena::Span rest = value_of(arena_->allocate(64 * kKiB - 3 * kBlock));
  const HostArena::Span one_more = value_of(arena_->allocate(kBlock));
  const HostPlaces places = index_.find_in_host(blocks_, contents_, {});
  EXPECT_EQ(places.retained_bytes[0], kBlock);
  EXPECT_EQ(places.retained_bytes[1], kBlock);
  EXPECT_EQ(places.retained_bytes[2], 0u) << "the last goes first";
}

TEST_F(ContentIndexTest, ForgottenBlocksAreNowhere) {
  retain({{5, 50}});
  const SealId checkpoint{1};
  index_.checkpoints().note(checkpoint, {}, blocks_, contents_);
  EXPECT_TRUE(index_.checkpoints().find(checkpoint, 5, contents_[0]));
  index_.forget_blocks();
  EXPECT_EQ(index_.find_in_host(blocks_, contents_, {}).retained_bytes[0], 0u);
  EXPECT_FALSE(index_.checkpoints().find(checkpoint, 5, contents_[0]));
}

TEST_F(ContentIndexTest, ADigestThatIsTakenInTheBackgroundCountsWhereNobodyWroteMeanwhile) {
  index_.watch_weights();
  index_.note_watched_digest("first");
  EXPECT_EQ(index_.digest(kWeights), "first");

  index_.watch_weights();
  index_.note_write(kWeights);
  index_.note_watched_digest("of other bytes");
  EXPECT_EQ(index_.digest(kWeights), std::nullopt);

  index_.watch_weights();
  index_.invalidate_digest(kWeights);
  index_.note_watched_digest("of bytes that may be others");
  EXPECT_EQ(index_.digest(kWeights), std::nullopt);
}

TEST_F(ContentIndexTest, AWriteWithoutANoteIsNoticedAndVoidsTheDigest) {
  index_.note_filled(kWeights, "filled");
  EXPECT_FALSE(index_.notice_write(kWeights));
  EXPECT_EQ(index_.digest(kWeights), "filled");
  weights()[0] ^= 1;
  EXPECT_TRUE(index_.notice_write(kWeights));
  EXPECT_EQ(index_.digest(kWeights), std::nullopt);
  EXPECT_FALSE(index_.notice_write(kWeights)) << "it is noticed once";
}

}  // namespace
}  // namespace torpor
