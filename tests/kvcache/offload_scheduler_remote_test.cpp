// SPDX-License-Identifier: Apache-2.0
// Two engines over one store on another machine.
#include "tests/kvcache/offload_scene.h"
#include "tests/kvcache/shared_store.h"

namespace torpor {
namespace {

using namespace test;

class RemoteTest : public ::testing::Test {
 protected:
  std::unique_ptr<OffloadScene> engine(int32_t remote_slots = 8) {
    OffloadSceneOptions options{.placement = {.remote = true}};
    options.rank.remote = &shared_;
    options.rank.remote_slots = remote_slots;
    options.scheduler.queue.min_batch_size = 1;
    return std::make_unique<OffloadScene>(std::move(options));
  }
  static uint64_t count(const OffloadScene& scene, Way way, BlockOutcome outcome) {
    return scene.scheduler->queue().counts(way)[static_cast<size_t>(outcome)];
  }
  // What a request that arrives finds when its lookup has ended.
  static int32_t look_up_and_load(OffloadScene& scene, const std::vector<uint32_t>& keys,
                                  const std::vector<int32_t>& blocks) {
    const uint32_t request = scene.scheduler->begin_request("asks");
    const bool began = scene.scheduler->begin_lookup(request, scene.keys_of(keys)) > 0;
    EXPECT_EQ(scene.scheduler->lookup_pending(request), began);
    EXPECT_EQ(scene.scheduler->busy(), began);
    scene.drain();
    EXPECT_FALSE(scene.scheduler->lookup_pending(request));
    EXPECT_TRUE(scene.scheduler->finished(request));
    return scene.load(keys, blocks);
  }
  static void store(OffloadScene& scene, const std::vector<uint32_t>& keys) {
    std::vector<int32_t> blocks;
    for (const uint32_t key : keys) {
      blocks.push_back(static_cast<int32_t>(blocks.size()));
      scene.compute(blocks.back(), 100 + key);
    }
    (void)scene.offer(keys, blocks);
    scene.drain();
  }

  SharedBlocks shared_;
};

TEST_F(RemoteTest, WhatOneComputedAnotherFindsOnEveryRank) {
  const auto one = engine();
  const auto other = engine();
  store(*one, {1, 2, 3});
  EXPECT_EQ(count(*one, Way::kPublish, BlockOutcome::kTransferred), 3u);
  EXPECT_EQ(shared_.blocks.size(), 6u);  // of two ranks
  EXPECT_EQ(other->hits({1, 2, 3}), 0);  // it was not asked
  EXPECT_EQ(look_up_and_load(*other, {1, 2, 3, 4}, {5, 6, 7}), 3);
  for (const uint32_t key : {1, 2, 3}) EXPECT_TRUE(other->all_have(4 + static_cast<int32_t>(key), 100 + key));
  EXPECT_EQ(count(*other, Way::kLookup, BlockOutcome::kTransferred), 3u);
  EXPECT_EQ(count(*other, Way::kLookup, BlockOutcome::kAbsent), 1u);
  EXPECT_EQ(other->scheduler->loaded_from_remote(), 3);
  // What came from there goes to host memory, and not out again.
  (void)other->offer({1, 2, 3}, {5, 6, 7});
  other->drain();
  EXPECT_EQ(count(*other, Way::kOffload, BlockOutcome::kTransferred), 3u);
  EXPECT_EQ(count(*other, Way::kPublish, BlockOutcome::kTransferred), 0u);
  const uint32_t request = other->scheduler->begin_request("again");
  EXPECT_EQ(other->scheduler->begin_lookup(request, other->keys_of({1, 2, 3})), 0u);  // all are nearer
  EXPECT_TRUE(other->scheduler->finished(request));
}

TEST_F(RemoteTest, CopiesFromTheDeviceEndWhileBlocksForTheStoreWait) {
  const auto one = engine();
  one->compute(0, 101);
  (void)one->offer({1}, {0});
  for (int step = 0; step < 10 && one->scheduler->moves_device(); ++step) {
    one->send(true, true);
    for (size_t rank = 0; rank < one->ranks.size(); ++rank)
      EXPECT_SUCCEEDS(one->scheduler->apply(one->report_of(rank)));
  }
  EXPECT_FALSE(one->scheduler->moves_device());
  EXPECT_FALSE(one->send(true, true));
  EXPECT_EQ(count(*one, Way::kOffload, BlockOutcome::kTransferred), 1u);
  EXPECT_TRUE(one->scheduler->busy());
  EXPECT_EQ(shared_.blocks.size(), 0u);
  one->drain();
  EXPECT_EQ(shared_.blocks.size(), 2u);  // of two ranks
}

TEST_F(RemoteTest, BlocksComeBackToHostMemoryWhenAskedFor) {
  const auto scene = engine();
  store(*scene, {1, 2});
  EXPECT_EQ(scene->scheduler->drop(scene->keys_of({1, 2}), StoreId::kHost).dropped, 2u);
  const std::vector<TransferHandle> brought = scene->scheduler->bring(scene->keys_of({1, 2}), StoreId::kHost);
  scene->drain();
  ASSERT_EQ(brought.size(), 1u);
  EXPECT_EQ(brought[0].count(BlockOutcome::kTransferred), 2u);
  shared_.gone = true;
  EXPECT_EQ(scene->load({1, 2}, {5, 6}), 2);
  EXPECT_TRUE(scene->all_have(5, 101) && scene->all_have(6, 102));
}

TEST_F(RemoteTest, ABlockThatTheStoreHasNoMoreIsForgotten) {
  const auto scene = engine();
  store(*scene, {1});
  EXPECT_EQ(scene->scheduler->drop(scene->keys_of({1}), StoreId::kHost).dropped, 1u);
  shared_.blocks.clear();
  const std::vector<TransferHandle> brought = scene->scheduler->bring(scene->keys_of({1}), StoreId::kHost);
  scene->drain();
  ASSERT_EQ(brought.size(), 1u);
  EXPECT_EQ(brought[0].count(BlockOutcome::kDamaged), 1u);
  EXPECT_EQ(scene->hits({1}), 0);
}

TEST_F(RemoteTest, PrioritiesHoldOnTheWayOutToo) {
  const auto scene = engine();
  scene->compute(0, 100);
  scene->compute(1, 101);
  (void)scene->offer({0}, {0}, 0, -1);
  (void)scene->offer({1}, {1}, 0, 1);
  scene->send();  // both down, in one batch
  for (size_t rank = 0; rank < scene->ranks.size(); ++rank)
    ASSERT_SUCCEEDS(scene->scheduler->apply(scene->report_of(rank)));
  const TransferPlan& plan = scene->scheduler->plan_step(true);
  ASSERT_EQ(plan.keys.size(), 2u);
  EXPECT_EQ(plan.keys[0].hash, key_number(1).hash);
  EXPECT_EQ(plan.keys[1].hash, key_number(0).hash);
  const TransferPlan read = value_of(TransferPlan::decode(plan.encode()));
  for (const auto& rank : scene->ranks) ASSERT_SUCCEEDS(rank->worker().run(read));
  for (size_t rank = 0; rank < scene->ranks.size(); ++rank)
    ASSERT_SUCCEEDS(scene->scheduler->apply(scene->report_of(rank)));
  scene->drain();
}

TEST_F(RemoteTest, WhatOneRankLacksIsFoundByNone) {
  const auto one = engine();
  store(*one, {1, 2});
  shared_.blocks.erase(shared_.blocks.begin());  // of rank 0
  const auto other = engine();
  EXPECT_LT(look_up_and_load(*other, {1, 2}, {5, 6}), 2);
  EXPECT_EQ(count(*other, Way::kLookup, BlockOutcome::kAbsent), 1u);
}

TEST_F(RemoteTest, WhatHasGoneMeanwhileIsComputedAndNotFoundAgain) {
  const auto one = engine();
  store(*one, {1, 2, 3});
  const auto other = engine();
  const uint32_t request = other->scheduler->begin_request("asks");
  EXPECT_EQ(other->scheduler->begin_lookup(request, other->keys_of({1, 2, 3})), 3u);
  other->drain();
  EXPECT_TRUE(other->scheduler->finished(request));
  shared_.blocks.clear();  // the server needed room
  EXPECT_EQ(other->load({1, 2, 3}, {5, 6, 7}), 0);
  EXPECT_EQ(count(*other, Way::kOnboard, BlockOutcome::kDamaged), 3u);
  EXPECT_EQ(other->hits({1, 2, 3}), 0);
}

TEST_F(RemoteTest, OneThatIsGoneCostsNoBlockAndIsNotAskedUntilItSaysSo) {
  const auto one = engine();
  store(*one, {1, 2});
  const auto other = engine();
  EXPECT_EQ(look_up_and_load(*other, {1, 2}, {5, 6}), 2);
  shared_.gone = shared_.refusing = true;
  store(*other, {7});                                                       // its report says that nothing is taken
  EXPECT_EQ(count(*other, Way::kOffload, BlockOutcome::kTransferred), 1u);  // to host memory, as ever
  EXPECT_EQ(count(*other, Way::kPublish, BlockOutcome::kTransferred), 0u);
  EXPECT_EQ(count(*other, Way::kPublish, BlockOutcome::kDegraded), 1u);
  EXPECT_EQ(other->hits({1, 2}), 0);  // although they were there
  const uint32_t request = other->scheduler->begin_request("asks");
  EXPECT_EQ(other->scheduler->begin_lookup(request, other->keys_of({3})), 0u);
  EXPECT_TRUE(other->scheduler->finished(request));
  shared_.gone = shared_.refusing = false;
  store(*other, {9});
  EXPECT_EQ(other->hits({1, 2}), 2);
}

TEST_F(RemoteTest, ALookupWithoutAnAnswerIsCountedAndTheRequestGoesOn) {
  const auto one = engine();
  store(*one, {1});
  const auto other = engine();
  shared_.gone = true;
  EXPECT_EQ(look_up_and_load(*other, {1}, {5}), 0);
  EXPECT_EQ(count(*other, Way::kLookup, BlockOutcome::kFailed), 1u);
  shared_.gone = false;
  EXPECT_EQ(look_up_and_load(*other, {1}, {5}), 1);
}

TEST_F(RemoteTest, AfterAResetNothingOfBeforeIsFoundAndLateAnswersAreWorthNothing) {
  const auto one = engine();
  store(*one, {1, 2});
  const auto other = engine();
  const uint32_t request = other->scheduler->begin_request("asks");
  EXPECT_EQ(other->scheduler->begin_lookup(request, other->keys_of({1})), 1u);
  other->send();
  ASSERT_SUCCEEDS(other->scheduler->reset());
  EXPECT_FALSE(other->scheduler->lookup_pending(request));
  const Digest another = digest_of(std::as_bytes(std::span("another")));
  for (const auto& rank : other->ranks) rank->worker().open_space(other->scheduler->space(), another, another);
  for (size_t rank = 0; rank < other->ranks.size(); ++rank)
    EXPECT_SUCCEEDS(other->scheduler->apply(other->report_of(rank)));
  EXPECT_TRUE(other->scheduler->finished(request));
  EXPECT_EQ(other->hits({1}), 0);
  EXPECT_EQ(look_up_and_load(*other, {1, 2}, {5, 6}), 0);
  EXPECT_SUCCEEDS(other->scheduler->check());
}

TEST_F(RemoteTest, WhatIsRememberedOfItIsBounded) {
  const auto one = engine();
  store(*one, {1, 2, 3, 4, 5, 6});
  const auto other = engine(4);
  EXPECT_EQ(look_up_and_load(*other, {1, 2, 3, 4, 5, 6}, {5, 6, 7, 8, 9, 10}), 0);  // the first ones gave way
  EXPECT_EQ(other->scheduler->index().counts(StoreId::kRemote).visible, 4);
  EXPECT_EQ(look_up_and_load(*other, {1, 2}, {5, 6}), 2);
}

}  // namespace
}  // namespace torpor
