// SPDX-License-Identifier: Apache-2.0
// Blocks on disk, as the scheduler sees them: on from host memory, found after a restart, used and reinserted.
#include <filesystem>
#include <fstream>

#include "tests/kvcache/offload_scheduler_scene.h"

namespace torpor {
namespace {

using namespace test;

TEST_P(OffloadSchedulerTest, BlocksGoOnToDiskAndARestartFindsThem) {
  OffloadScene& scene = this->scene({.rank = {.host_slots = 2}, .placement = {.disk = true}});
  for (int32_t block = 0; block < 6; ++block) scene.compute(block, 10 + static_cast<uint32_t>(block));
  for (int32_t block = 0; block < 6; ++block) {
    (void)scene.offer({static_cast<uint32_t>(block)}, {block});
    scene.drain();
  }
  EXPECT_EQ(scene.scheduler->queue().counts(Way::kDemote)[static_cast<size_t>(BlockOutcome::kTransferred)], 6u);
  EXPECT_EQ(scene.load({0, 1, 2, 3, 4, 5}, {8, 9, 10, 11, 12, 13}), 6);  // from both stores
  for (int32_t block = 0; block < 6; ++block) EXPECT_TRUE(scene.all_have(8 + block, 10 + static_cast<uint32_t>(block)));
  scene.restart();
  for (int32_t block = 8; block < 14; ++block) scene.compute(block, 77);
  EXPECT_EQ(scene.load({0, 1, 2, 3, 4, 5}, {8, 9, 10, 11, 12, 13}), 6);
  for (int32_t block = 0; block < 6; ++block) EXPECT_TRUE(scene.all_have(8 + block, 10 + static_cast<uint32_t>(block)));
  // The disk is full in the end: the oldest segments go, those that a restart found too.
  for (uint32_t key = 100; key < 130; ++key) {
    scene.compute(0, key);
    (void)scene.offer({key}, {0});
    scene.drain();
  }
  EXPECT_EQ(scene.hits({0}), 0);
  EXPECT_EQ(scene.load({129}, {9}), 1);
  EXPECT_TRUE(scene.all_have(9, 129));
}

// What nobody sends to disk by itself goes there when it is asked for, and is found there when host memory has it no
// more.
TEST_P(OffloadSchedulerTest, WhoAsksForItMovesBlocksOnToDisk) {
  OffloadScene& scene =
      this->scene({.rank = {.host_slots = 8, .disk_segments = 4, .segment_slots = 4}, .placement = {.disk = false}});
  scene.compute(0, 10);
  scene.compute(1, 11);
  (void)scene.offer({0, 1}, {0, 1});
  scene.drain();
  EXPECT_EQ(scene.scheduler->drop(scene.keys_of({0, 1}), StoreId::kDisk).absent, 2u);
  const MovedKeys moved = value_of(scene.scheduler->move_on(scene.keys_of({0, 1, 2})));
  EXPECT_EQ(moved.blocks, 2u);  // the third is nowhere
  scene.drain();
  EXPECT_EQ(value_of(scene.scheduler->move_on(scene.keys_of({0, 1}))).blocks, 0u);  // they are there
  EXPECT_EQ(scene.scheduler->drop(scene.keys_of({0, 1}), StoreId::kHost).dropped, 2u);
  scene.drain();
  EXPECT_EQ(scene.load({0, 1}, {8, 9}), 2);
  EXPECT_TRUE(scene.all_have(8, 10));
  EXPECT_TRUE(scene.all_have(9, 11));
}

// Blocks that are only in the segment that is evicted next, and were loaded since they were written, are reinserted.
TEST_P(OffloadSchedulerTest, UsedBlocksOfASegmentThatIsEvictedAreReinserted) {
  OffloadScene& scene = this->scene({.rank = {.host_slots = 0}, .placement = {.host = false, .disk = true}});
  const auto store = [&](uint32_t key) {
    scene.compute(0, key);
    (void)scene.offer({key}, {0});
    scene.drain();
  };
  uint32_t key = 1;
  while (scene.scheduler->index().disk_room() > 0) store(key++);  // every segment is full
  store(key++);                                                   // the oldest has gone
  EXPECT_EQ(scene.hits({1}), 0);
  EXPECT_EQ(scene.scheduler->reinserted(), 0);  // of the next one nothing was used
  EXPECT_EQ(scene.load({10}, {5}), 1);
  for (int i = 0; i < 12; ++i) store(key++);
  EXPECT_EQ(scene.scheduler->reinserted(), 1);
  EXPECT_EQ(scene.hits({9}), 0);
  EXPECT_EQ(scene.load({10}, {6}), 1);
  EXPECT_TRUE(scene.all_have(6, 10));
  scene.restart();
  EXPECT_EQ(scene.load({10}, {7}), 1);
  EXPECT_TRUE(scene.all_have(7, 10));
}

// What is found on disk alone and loaded comes into host memory, when it is offered like any block that became full.
TEST_P(OffloadSchedulerTest, WhatWasLoadedFromDiskIsPromotedWhenItIsOffered) {
  OffloadScene& scene = this->scene({.rank = {.host_slots = 2}, .placement = {.disk = true}});
  for (uint32_t key = 1; key <= 4; ++key) {
    scene.compute(0, key);
    (void)scene.offer({key}, {0});
    scene.drain();
  }
  EXPECT_EQ(scene.load({1}, {5}), 1);
  const TransferHandle promoted = scene.offer({1}, {5});
  scene.drain();
  EXPECT_EQ(promoted.count(BlockOutcome::kTransferred), 1u);
  const BlockKey block = scene.keys_of({1})[0];
  BlockLocations places;
  EXPECT_EQ(scene.scheduler->index().run({&block, 1}, {&places, 1}), 1u);
  EXPECT_TRUE(places.host >= 0 && places.disk >= 0);
}

TEST_P(OffloadSchedulerTest, BlocksOnDiskComeBackToHostMemoryWhenAskedFor) {
  OffloadScene& scene = this->scene({.rank = {.host_slots = 4}, .placement = {.disk = true}});
  for (int32_t block = 0; block < 3; ++block) {
    scene.compute(block, 10 + static_cast<uint32_t>(block));
    (void)scene.offer({static_cast<uint32_t>(block)}, {block});
    scene.drain();
  }
  EXPECT_EQ(scene.scheduler->drop(scene.keys_of({0, 1}), StoreId::kHost).dropped, 2u);
  const std::vector<TransferHandle> brought = scene.scheduler->bring(scene.keys_of({0, 1, 2, 3}), StoreId::kHost);
  ASSERT_EQ(brought.size(), 1u);  // the third is there already, the fourth nowhere
  scene.drain();
  EXPECT_EQ(brought[0].count(BlockOutcome::kTransferred), 2u);
  std::vector<BlockLocations> places(2);
  scene.scheduler->index().find_each(scene.keys_of({0, 1}), places);
  for (const BlockLocations& each : places) EXPECT_TRUE(each.host >= 0 && each.disk >= 0);
  EXPECT_TRUE(scene.scheduler->bring(scene.keys_of({0, 1, 2}), StoreId::kHost).empty());
  EXPECT_EQ(scene.scheduler->drop(scene.keys_of({0, 1, 2}), StoreId::kDisk).dropped, 3u);
  EXPECT_EQ(scene.load({0, 1, 2}, {8, 9, 10}), 3);
  for (int32_t block = 0; block < 3; ++block) EXPECT_TRUE(scene.all_have(8 + block, 10 + static_cast<uint32_t>(block)));
}

TEST_P(OffloadSchedulerTest, ABlockThatIsDamagedOnDiskDoesNotComeIntoHostMemory) {
  OffloadScene& scene = this->scene({.rank = {.host_slots = 4}, .placement = {.disk = true}});
  scene.compute(0, 10);
  (void)scene.offer({0}, {0});
  scene.drain();
  EXPECT_EQ(scene.scheduler->drop(scene.keys_of({0}), StoreId::kHost).dropped, 1u);
  scene.drain();
  for (const auto& entry : std::filesystem::recursive_directory_iterator(temporary_ / "store")) {
    if (!entry.is_regular_file()) continue;
    const std::string zeros(entry.file_size(), '\0');
    std::ofstream(entry.path(), std::ios::in | std::ios::out | std::ios::binary) << zeros;
  }
  const std::vector<TransferHandle> brought = scene.scheduler->bring(scene.keys_of({0}), StoreId::kHost);
  scene.drain();
  ASSERT_EQ(brought.size(), 1u);
  EXPECT_EQ(brought[0].count(BlockOutcome::kDamaged), 1u);
  EXPECT_EQ(scene.hits({0}), 0);
}

TEST_P(OffloadSchedulerTest, WithADiskAloneBlocksGoThereAtOnce) {
  OffloadScene& scene = this->scene({.rank = {.host_slots = 0}, .placement = {.host = false, .disk = true}});
  scene.compute(0, 10);
  (void)scene.offer({1}, {0});
  scene.drain();
  EXPECT_EQ(scene.load({1}, {5}), 1);
  EXPECT_TRUE(scene.all_have(5, 10));
}

TEST_P(OffloadSchedulerTest, OfALoadTooTheCauseReachesTheHandle) {
  OffloadScene& scene = this->scene();
  scene.compute(0, 10);
  (void)scene.offer({1}, {0});
  scene.drain();
  scene.ranks[1]->worker().store(StoreId::kHost)->view({.offset = 0})[7] ^= std::byte{1};
  const uint32_t request = scene.scheduler->begin_request("r", 3);
  ASSERT_EQ(scene.scheduler->match(request, scene.keys_of({1}), 0), 1);
  const TransferHandle load = scene.scheduler->allocated(request, std::vector<int32_t>{5});
  scene.drain();
  EXPECT_EQ(load.count(BlockOutcome::kDamaged), 1u);
  EXPECT_FAILS(load.cause(), Code::kCorruption, "rank 1");
  (void)scene.scheduler->take_loads();
  EXPECT_TRUE(scene.scheduler->finished(request));
}

}  // namespace
}  // namespace torpor
