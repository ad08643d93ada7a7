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
        index_(*device_, *allocator_, *arena_) {}
  char* weights() { return reinterpret_cast<char*>(weights_); }  // NOLINT(performance-no-int-to-ptr)
  void retain(std::initializer_list<std::pair<int32_t, uint64_t>> blocks) {
    RetainedBlocks::Blocks all{.host = std::make_unique<HostTier>(*arena_), .chunks = {}, .contents = {}};
    for (const auto& [number, version] : blocks) {
      SavedChunk chunk{.key = {.kind = ChunkKind::kKvBlock, .tag = "kv_cache", .index = static_cast<uint64_t>(number)},
                       .bytes = kBlock};
      std::memset(value_of(all.host->place(chunk)).data(), number, kBlock);
      all.chunks.push_back(chunk);
      all.contents.push_back({.version = version});
    }
    index_.retain(std::move(all), 3 * kBlock);
  }
  uint64_t used() const { return arena_->info().used_bytes; }
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
  EXPECT_EQ(index_.find_retained(blocks_, contents_), (std::vector<uint64_t>{kBlock, 0, 0}));
  const RetainedBlocks::Taken taken = index_.take_retained(blocks_, contents_);
  EXPECT_EQ(taken.bytes, (std::vector<uint64_t>{kBlock, 0, 0}));
  ASSERT_EQ(taken.blocks.chunks.size(), 1u);
  EXPECT_EQ(taken.blocks.host->view(taken.blocks.chunks[0])[0], std::byte{5});
  EXPECT_EQ(index_.retained_bytes(), 0u);
  EXPECT_EQ(used(), kBlock) << "what had another version has gone";
}

TEST_F(ContentIndexTest, BlocksAreTakenInTheOrderInWhichTheyAreWantedAndOnce) {
  retain({{7, 70}, {9, 90}, {5, 50}, {6, 60}});  // the budget is for three
  const std::vector<int32_t> wanted{5, 7, 5, 6};
  const std::vector<BlockContent> contents{{.version = 50}, {.version = 70}, {.version = 50}, {.version = 60}};
  const RetainedBlocks::Taken taken = index_.take_retained(wanted, contents);
  EXPECT_EQ(taken.bytes, (std::vector<uint64_t>{kBlock, kBlock, 0, 0}));
  ASSERT_EQ(taken.blocks.chunks.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    const SavedChunk& chunk = taken.blocks.chunks[i];
    EXPECT_EQ(chunk.key.index, static_cast<uint64_t>(wanted[i]));
    EXPECT_EQ(taken.blocks.contents[i].version, contents[i].version);
    EXPECT_EQ(taken.blocks.host->view(chunk)[0], static_cast<std::byte>(wanted[i]));
  }
  EXPECT_EQ(used(), 2 * kBlock);
}

TEST_F(ContentIndexTest, AHostStoreIsAskedUntilItIsNotBelieved) {
  const std::shared_ptr<HostStore> store = value_of(HostStore::create(*arena_, {.slots = 2, .slot_bytes = kBlock}));
  index_.set_host_store(store);
  SavedChunk second{.bytes = kBlock, .offset = 1};
  std::memset(value_of(store->place(second)).data(), 'x', kBlock);
  ASSERT_SUCCEEDS(store->placed(1, {}));
  const std::vector<Slot> slots{-1, 1, 0};
  const BlocksInStore found = index_.find_in_store(slots);
  ASSERT_EQ(found.stored.size(), 3u);
  ASSERT_TRUE(found.stored[1]);
  EXPECT_EQ(found.stored[1]->bytes[0], std::byte{'x'});
  EXPECT_FALSE(found.stored[0] || found.stored[2]);
  EXPECT_TRUE(index_.find_in_store({}).stored.empty());
  index_.set_host_store({});
  EXPECT_TRUE(index_.find_in_store(slots).stored.empty());
}

TEST_F(ContentIndexTest, WhatIsRetainedGoesWhereTheArenaNeedsRoom) {
  retain({{5, 50}, {6, 60}, {7, 70}});
  EXPECT_EQ(index_.retained_bytes(), 3 * kBlock);
  const HostArena::Span rest = value_of(arena_->allocate(64 * kKiB - 3 * kBlock));
  const HostArena::Span one_more = value_of(arena_->allocate(kBlock));
  const std::vector<uint64_t> left{kBlock, kBlock, 0};
  EXPECT_EQ(index_.find_retained(blocks_, contents_), left) << "the last goes first";
  const RetainedBlocks::Taken taken = index_.take_retained(blocks_, contents_);
  EXPECT_EQ(taken.bytes, left);
  EXPECT_EQ(taken.blocks.host->view(taken.blocks.chunks.at(1))[0], std::byte{6});
}

TEST_F(ContentIndexTest, ForgottenBlocksAreNowhere) {
  retain({{5, 50}});
  const SealId checkpoint{1};
  index_.checkpoints().note(checkpoint, {}, blocks_, contents_);
  EXPECT_TRUE(index_.checkpoints().find(checkpoint, 5, contents_[0]));
  index_.forget_blocks();
  EXPECT_EQ(index_.find_retained(blocks_, contents_)[0], 0u);
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
