// SPDX-License-Identifier: Apache-2.0
// Tags of several regions, which come and go: each way down and up plans from what it has, not from the order in which
// regions were allocated.
#include <cstring>

#include "allocator/host_device.h"
#include "base/swap_channel.h"
#include "base/units.h"
#include "engine/rank_memory.h"
#include "engine/reference/scattered_regions.h"
#include "engine/tag_sleep.h"
#include "tests/support/rank_call.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor {
namespace {

using test::value_of;

constexpr uint64_t kSize = 5 * kMiB;  // two pieces

std::byte* at(DeviceAddress address) {
  return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
}

class Regions : public ::testing::Test {
 protected:
  void make(RankMemoryOptions options = {}, const std::string& tag = "weights") {
    options.handle_bytes = 64 * kKiB;
    options.threads = 2;
    memory_ = value_of(RankMemory::create(value_of(make_host_device({.huge_pages = [] { return false; }})),
                                          linux_file_system(), std::move(options)));
    tag_ = tag;
    const std::vector<uint64_t> sizes(3, kSize);
    at_ = value_of(reference::allocate_scattered(*memory_, tag_, sizes, 1));
    for (size_t i = 0; i < at_.size(); ++i) write(i, static_cast<int>(5 + i));
  }
  RankMemoryOptions spilling() const {
    return {.arena_budget_bytes = 2 * kSize + 2 * kMiB,
            .arena_slab_bytes = kMiB,
            .spill_dir = temporary_ / "spill",
            .spill_staging_bytes = kMiB};
  }
  void write(size_t region, int value) { std::memset(at(at_[region]), value, kSize); }
  bool holds(size_t region, int value) const {
    return std::all_of(at(at_[region]), at(at_[region]) + kSize,
                       [&](std::byte byte) { return byte == static_cast<std::byte>(value); });
  }
  template <class Order>
  Result<typename Order::Reply> call(const Order& order) {
    return test::call_rank(*memory_, order);
  }
  uint64_t sleep() {
    const uint64_t bytes = value_of(call(orders::Save{.tags = {tag_}})).bytes;
    EXPECT_SUCCEEDS(call(orders::Detach{.tags = {tag_}}));
    return bytes;
  }
  void wake() {
    ASSERT_SUCCEEDS(call(orders::Restore{.tags = {tag_}}));
    ASSERT_SUCCEEDS(call(orders::Finish{.tags = {tag_}, .keep_backup = true}));
  }
  std::string digest() { return value_of(call(orders::DigestTags{.tags = {tag_}})).digests.at(tag_); }
  std::string room() {
    channel_ = value_of(SwapChannel::create(temporary_ / "room"));
    EXPECT_SUCCEEDS(channel_->supply(0, 3 * kSize));
    return temporary_ / "room";
  }

  test::TemporaryDirectory temporary_;
  std::unique_ptr<RankMemory> memory_;
  std::string tag_;
  std::vector<DeviceAddress> at_;
  std::unique_ptr<SwapChannel> channel_;
};

// The kernel decides where a mapping lies, so one seed alone may have them in order.
TEST_F(Regions, AddressesNeitherRiseNorFallInTheOrderOfAllocation) {
  make();
  size_t scattered = 0;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    const std::string tag = "t" + std::to_string(seed);
    (void)value_of(reference::allocate_scattered(*memory_, tag, std::vector<uint64_t>(3, kSize), seed));
    std::vector<DeviceAddress> allocated;
    for (const RegionInfo& region : memory_->allocator().regions_of(tag)) allocated.push_back(region.address);
    if (!std::is_sorted(allocated.begin(), allocated.end()) && !std::is_sorted(allocated.rbegin(), allocated.rend()))
      ++scattered;
  }
  EXPECT_GT(scattered, 0U);
}

TEST_F(Regions, WhatWasGivenToAnotherEngineWakesAndHasTheSameDigest) {
  make();
  const std::string before = digest();
  ASSERT_SUCCEEDS(call(orders::Save{.tags = {tag_}, .channel = room()}));
  ASSERT_SUCCEEDS(call(orders::Detach{.tags = {tag_}}));
  EXPECT_EQ(digest(), before);
  wake();
  EXPECT_EQ(digest(), before);
  EXPECT_TRUE(holds(0, 5) && holds(1, 6) && holds(2, 7));
}

TEST_F(Regions, WhatWasGivenIsTakenBack) {
  make();
  ASSERT_SUCCEEDS(call(orders::Save{.tags = {tag_}, .channel = room()}));
  ASSERT_SUCCEEDS(call(orders::Undo{.what = orders::Undo::What::kReleasedPages, .tags = {tag_}}));
  ASSERT_SUCCEEDS(call(orders::Undo{.what = orders::Undo::What::kSave, .tags = {tag_}}));
  EXPECT_TRUE(holds(0, 5) && holds(1, 6) && holds(2, 7));
}

TEST_F(Regions, OneThatWasFreedAsleepLeavesTheOthersWakeable) {
  for (const bool spills : {false, true}) {
    for (size_t freed = 0; freed < 3; ++freed) {
      SCOPED_TRACE(testing::Message() << "region " << freed << (spills ? ", spilled" : ""));
      make(spills ? spilling() : RankMemoryOptions{});
      const orders::Save::Reply saved = value_of(call(orders::Save{.tags = {tag_}}));
      EXPECT_EQ(saved.spilled_bytes > 0, spills);
      ASSERT_SUCCEEDS(call(orders::Detach{.tags = {tag_}}));
      ASSERT_SUCCEEDS(memory_->free(at_[freed]));
      wake();
      for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(i == freed || holds(i, static_cast<int>(5 + i))) << i;
    }
  }
}

// Whoever allocates while the tag sleeps writes at once; the wake leaves that as it is.
TEST_F(Regions, OneThatWasAllocatedAsleepStaysAsItIs) {
  for (const bool freed : {false, true}) {
    SCOPED_TRACE(freed);
    make({.keep_backup = true});
    sleep();
    if (freed) {
      ASSERT_SUCCEEDS(memory_->free(at_[1]));
    }
    at_.push_back(value_of(memory_->allocate(tag_, "new", kSize)));
    write(3, 33);
    EXPECT_EQ(memory_->ledger().tags.at(tag_).state, "detached");
    EXPECT_EQ(memory_->ledger().tags.at(tag_).physical_bytes, kSize);
    ASSERT_SUCCEEDS(call(orders::Restore{.tags = {tag_}}));
    ASSERT_SUCCEEDS(call(orders::Undo{.what = orders::Undo::What::kRestore, .tags = {tag_}}));  // undone: it stays, too
    EXPECT_TRUE(holds(3, 33));
    wake();
    EXPECT_EQ(memory_->states().at(tag_), RegionState::kAttached);
    EXPECT_EQ(sleep(), (freed ? 3 : 4) * kSize);  // the backup of the first has not all of it
    wake();
    EXPECT_TRUE(holds(0, 5) && (freed || holds(1, 6)) && holds(2, 7) && holds(3, 33));
  }
}

TEST_F(Regions, ATagOfWhichAllWasFreedAsleepIsNoReasonNotToWake) {
  for (const bool another : {false, true}) {
    SCOPED_TRACE(another);
    make({}, "workspace");
    const DeviceAddress weights = value_of(memory_->allocate("weights", "w", kSize));
    std::memset(at(weights), 9, kSize);
    ASSERT_SUCCEEDS(call(orders::Save{.tags = {"weights", "workspace"}}));
    ASSERT_SUCCEEDS(call(orders::Detach{.tags = {"weights", "workspace"}}));
    for (const DeviceAddress address : at_) ASSERT_SUCCEEDS(memory_->free(address));
    if (another) {
      at_ = {value_of(memory_->allocate("workspace", "new", kSize))};
      write(0, 33);
    }
    for (const std::vector<std::string>& tags : {std::vector<std::string>{"workspace"}, {"weights", "workspace"}}) {
      const orders::Restore::Reply restored = value_of(call(orders::Restore{.tags = tags}));
      EXPECT_TRUE(restored.without_content.empty());
      if (tags.size() == 1) continue;  // and undone
      ASSERT_SUCCEEDS(call(orders::Finish{.tags = tags}));
    }
    EXPECT_EQ(*at(weights), std::byte{9});
    EXPECT_TRUE(!another || holds(0, 33));
  }
}

TEST_F(Regions, NeitherComesWhileMemoryIsOnItsWay) {
  make();
  ASSERT_SUCCEEDS(call(orders::Save{.tags = {tag_}}));
  EXPECT_FAILS(memory_->allocate(tag_, "new", kSize), Code::kFailedPrecondition, "saving");
  ASSERT_SUCCEEDS(call(orders::Detach{.tags = {tag_}}));
  ASSERT_SUCCEEDS(call(orders::Restore{.tags = {tag_}}));
  EXPECT_FAILS(memory_->allocate(tag_, "new", kSize), Code::kFailedPrecondition, "restoring");
  EXPECT_FAILS(memory_->free(at_[0]), Code::kFailedPrecondition, "restoring");
}

TEST_F(Regions, BlocksWhosePlaceWasFreedAsleepAreNotCopiedThere) {
  make({}, "kv_cache");
  ASSERT_SUCCEEDS(memory_->set_kv_layout(
      "kv_cache",
      {.num_blocks = 4,
       .tensors = {
           {.address = at_[1], .layers = 1, .layer_stride = kSize, .block_stride = kMiB, .block_bytes = kMiB}}}));
  ASSERT_SUCCEEDS(call(orders::Save{.tags = {tag_}, .blocks = {2}}));
  ASSERT_SUCCEEDS(call(orders::Detach{.tags = {tag_}}));
  ASSERT_SUCCEEDS(memory_->free(at_[0]));  // no block is there
  ASSERT_SUCCEEDS(memory_->free(at_[1]));
  EXPECT_FAILS(call(orders::Restore{.tags = {tag_}}), Code::kIncompatible, "KV block 2 does not exist");
}

// On a device where writes are not noticed a second sleep must not bring back the bytes of the first.
class SecondSleepOfRegions : public Regions, public ::testing::WithParamInterface<std::string> {};
INSTANTIATE_TEST_SUITE_P(Tags, SecondSleepOfRegions, ::testing::Values("runtime", "workspace", "cudagraph", "any"),
                         [](const auto& each) { return each.param; });

TEST_P(SecondSleepOfRegions, CopiesAllAgainAlsoWithAKeptBackup) {
  make({.keep_backup = true}, GetParam());
  for (int turn = 0; turn < 3; ++turn) {
    write(1, 20 + turn);  // no word of it
    EXPECT_EQ(sleep(), 3 * kSize);
    wake();
    EXPECT_TRUE(holds(0, 5) && holds(1, 20 + turn) && holds(2, 7));
  }
  for (int turn = 0; turn < 3; ++turn) {
    write(1, 30 + turn);
    EXPECT_EQ(value_of(TagSleep(*memory_).sleep({tag_}, {tag_})).clean_bytes, 0u);
    ASSERT_SUCCEEDS(TagSleep(*memory_).wake({tag_}));
    EXPECT_TRUE(holds(1, 30 + turn));
  }
}

TEST_P(SecondSleepOfRegions, BelievesDigestsOnlyOfTheSleepThatTookThem) {
  make({.keep_backup = true}, GetParam());
  sleep();
  wake();
  EXPECT_EQ(value_of(TagSleep(*memory_).sleep({tag_}, {tag_}, CleanCheck::kDigest)).clean_bytes, 3 * kSize);
  ASSERT_SUCCEEDS(TagSleep(*memory_).wake({tag_}));
  write(1, 40);
  EXPECT_EQ(value_of(TagSleep(*memory_).sleep({tag_}, {tag_})).clean_bytes, 0u);
  ASSERT_SUCCEEDS(TagSleep(*memory_).wake({tag_}));
  EXPECT_TRUE(holds(1, 40));
}

TEST_F(Regions, AKeptBackupOfWeightsHoldsUntilTheyAreMarkedOrARegionComesOrGoes) {
  make({.keep_backup = true});
  EXPECT_EQ(sleep(), 3 * kSize);
  wake();
  EXPECT_EQ(sleep(), 0u);
  wake();
  const DeviceAddress more = value_of(memory_->allocate(tag_, "more", kSize));
  EXPECT_EQ(sleep(), 4 * kSize);
  wake();
  ASSERT_SUCCEEDS(memory_->free(more));
  EXPECT_EQ(sleep(), 3 * kSize);
  wake();
  memory_->mark_dirty(tag_);
  EXPECT_EQ(sleep(), 3 * kSize);
  wake();
}

// Nobody has said that no other writes them.
TEST_F(Regions, WithoutTheUsersWordWeightsAreCopiedEachTimeOnAnyDevice) {
  make();
  EXPECT_EQ(sleep(), 3 * kSize);
  wake();
  EXPECT_EQ(sleep(), 3 * kSize);
}

}  // namespace
}  // namespace torpor
