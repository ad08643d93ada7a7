// SPDX-License-Identifier: Apache-2.0
// The scheduler with workers in one process, step by step; every byte is compared.
#include "kvcache/offload_scheduler.h"

#include <array>
#include <functional>
#include <thread>

#include <fmt/core.h>

#include "base/event_ring.h"
#include "base/watched_file_system.h"
#include "tests/kvcache/offload_scheduler_scene.h"

namespace torpor {
namespace {

using test::key_number;
using test::OffloadScene;
using test::OffloadSceneOptions;
using test::OffloadSchedulerTest;
using test::value_of;

INSTANTIATE_TEST_SUITE_P(Mode, OffloadSchedulerTest, ::testing::Values(OffloadMode::kEager, OffloadMode::kLazy),
                         [](const auto& info) { return info.param == OffloadMode::kEager ? "Eager" : "Lazy"; });

TEST_P(OffloadSchedulerTest, BlocksGoDownOnAllRanksAndComeBackUpByteForByte) {
  OffloadScene& scene = this->scene();
  for (int32_t block = 0; block < 3; ++block) scene.compute(block, 10 + static_cast<uint32_t>(block));
  const TransferHandle handle = scene.offer({1, 2, 3}, {0, 1, 2});
  EXPECT_EQ(handle.status(), TransferStatus::kQueued);
  scene.drain();
  EXPECT_EQ(handle.count(BlockOutcome::kTransferred), 3u);
  for (int32_t block = 0; block < 3; ++block) scene.compute(block, 99);
  EXPECT_EQ(scene.load({1, 2, 3, 4}, {5, 6, 7, 8}), 3);
  EXPECT_TRUE(scene.all_have(5, 10) && scene.all_have(6, 11) && scene.all_have(7, 12));
  EXPECT_EQ(scene.scheduler->index().counts(StoreId::kHost).visible, 3);
}

TEST_P(OffloadSchedulerTest, TimesAreThoseFromThePlanToTheLastRanksReportAndOfTheWholeLoad) {
  using namespace std::chrono_literals;
  OffloadScene& scene = this->scene();
  const auto in_two_seconds = [&] {
    ASSERT_TRUE(scene.send());
    for (size_t rank = 0; rank < scene.ranks.size(); ++rank) {
      if (rank + 1 == scene.ranks.size()) scene.clock.advance(2s);
      ASSERT_SUCCEEDS(scene.scheduler->apply(scene.report_of(rank)));
    }
  };
  scene.compute(0, 10);
  (void)scene.offer({1}, {0});
  scene.clock.advance(1s);  // it waits for its step: that is no batch's time
  in_two_seconds();
  const uint32_t request = scene.scheduler->begin_request("r");
  const std::vector<int32_t> blocks{5};
  ASSERT_EQ(scene.scheduler->match(request, scene.keys_of({1}), 0), 1);
  (void)scene.scheduler->allocated(request, blocks);
  scene.clock.advance(1s);  // it is the load's
  in_two_seconds();
  EXPECT_EQ(scene.scheduler->take_loads().size(), 1u);
  const OffloadTimes times = scene.scheduler->take_times();
  EXPECT_EQ(times.batches[static_cast<size_t>(Way::kOffload)], std::vector<double>{2.0});
  EXPECT_EQ(times.batches[static_cast<size_t>(Way::kOnboard)], std::vector<double>{2.0});
  EXPECT_EQ(times.loads, std::vector<double>{3.0});
  EXPECT_TRUE(scene.scheduler->take_times().loads.empty());
  scene.scheduler->loaded(request, blocks);
  EXPECT_TRUE(scene.scheduler->finished(request));
}

TEST_P(OffloadSchedulerTest, CachedTokensAreAddedUpAndRecordedForEachRequest) {
  const auto ring = value_of(EventRing::in_memory({}, 256));
  OffloadScene& scene = this->scene({.events = EventPort(*ring, system_clock())});
  const uint32_t request = scene.scheduler->begin_request("r");
  scene.scheduler->count_cached(request, {.device = 1, .stores = {20, 300, 4000}, .other = 50000});
  EXPECT_TRUE(scene.scheduler->finished(request));
  const uint32_t next = scene.scheduler->begin_request("next");
  scene.scheduler->count_cached(next, {.device = 1, .stores = {2, 3, 4}});
  EXPECT_TRUE(scene.scheduler->finished(next));
  EXPECT_EQ(scene.scheduler->cached(), (CachedTokens{.device = 2, .stores = {22, 303, 4004}, .other = 50000}));
  std::vector<Event> events;
  EventReader(*ring).read(events, true);
  events.erase(
      std::remove_if(events.begin(), events.end(), [](const Event& event) { return event.type != EventType::kCached; }),
      events.end());
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].request, event_request(request));
  EXPECT_EQ(events[0].a, both(1, 20));
  EXPECT_EQ(events[0].b, both(300, 4000));
  EXPECT_EQ(events[0].transfer, 50000u);
  EXPECT_EQ(events[1].b, both(3, 4));
}

TEST_P(OffloadSchedulerTest, S1ALiveBlockIsKnownByItsStampAndNeverByItsKey) {
  OffloadScene& scene = this->scene();
  scene.compute(0, 10);
  scene.compute(1, 20);  // the same tokens in another batch: an equal key, other bytes
  (void)scene.offer({1}, {0});
  scene.drain();
  const TransferHandle second = scene.offer({1}, {1});
  EXPECT_EQ(second.count(BlockOutcome::kFiltered), 1u);
  BlockIndex& index = scene.scheduler->index();
  EXPECT_GE(index.backing(0, scene.device.version(0)).host, 0);
  EXPECT_EQ(index.backing(1, scene.device.version(1)), BlockLocations());
  const ContentVersion before = scene.device.version(0);
  scene.compute(0, 30);
  EXPECT_EQ(index.backing(0, scene.device.version(0)), BlockLocations());
  EXPECT_GE(index.backing(0, before).host, 0);
  // What was loaded has the bytes of its slot; what was computed meanwhile does not.
  EXPECT_EQ(scene.load({1}, {4}), 1);
  EXPECT_GE(index.backing(4, scene.device.version(4)).host, 0);
}

TEST_P(OffloadSchedulerTest, S1ABlockThatIsWrittenAnewBeforeItsPlanIsNotStored) {
  OffloadScene& scene = this->scene();
  scene.compute(0, 10);
  const TransferHandle handle = scene.offer({1}, {0});
  scene.compute(0, 11);
  scene.drain();
  EXPECT_EQ(handle.count(BlockOutcome::kEvicted), 1u);
  EXPECT_EQ(scene.hits({1}), 0);
}

TEST_P(OffloadSchedulerTest, S1UnderACopyABlockIsHeldOrItsStampDecidesAtTheEnd) {
  OffloadScene& scene = this->scene();
  scene.compute(0, 10);
  scene.compute(1, 20);
  const TransferHandle handle = scene.offer({1, 2}, {0, 1});
  ASSERT_TRUE(scene.send());
  EXPECT_EQ(scene.device.holds(0), eager() ? 1 : 0);
  if (!eager()) scene.compute(0, 11);  // taken by another request before its copy is made
  scene.drain();
  EXPECT_EQ(scene.device.holds(0), 0);
  EXPECT_EQ(handle.count(BlockOutcome::kEvicted), eager() ? 0u : 1u);
  EXPECT_EQ(scene.hits({1}), eager() ? 1 : 0);
  EXPECT_EQ(scene.load({2}, {5}), 1);
  EXPECT_TRUE(scene.all_have(5, 20));
}

TEST_P(OffloadSchedulerTest, I2S2ASlotIsVisibleOnlyAfterEveryRankProvedItsPart) {
  OffloadScene& scene = this->scene();
  scene.compute(0, 10);
  (void)scene.offer({1}, {0});
  ASSERT_TRUE(scene.send());
  const TransferReport first = scene.report_of(0);
  EXPECT_SUCCEEDS(scene.scheduler->apply(first));
  EXPECT_SUCCEEDS(scene.scheduler->apply(first));  // S10: what comes again counts once
  EXPECT_EQ(scene.hits({1}), 0);
  EXPECT_TRUE(scene.scheduler->under_way());
  EXPECT_SUCCEEDS(scene.scheduler->apply(scene.report_of(1)));
  EXPECT_EQ(scene.hits({1}), 1);
  EXPECT_SUCCEEDS(scene.scheduler->apply(first));
  EXPECT_FALSE(scene.scheduler->busy());
}

TEST_P(OffloadSchedulerTest, S2TheFailureOfOneRankMakesASlotInvisibleOnAllAndItsCauseReachesTheHandle) {
  OffloadScene& scene = this->scene();
  scene.compute(0, 10);
  scene.compute(1, 20);
  const TransferHandle handle = scene.offer({1, 2}, {0, 1});
  scene.ranks[1]->device().fail_at(1, true);
  scene.drain();
  scene.ranks[1]->device().fail_at(0);
  EXPECT_EQ(handle.count(BlockOutcome::kFailed), 2u);
  EXPECT_FAILS(handle.cause(), Code::kDevice, "rank 1");
  EXPECT_EQ(scene.hits({1}), 0);
  EXPECT_EQ(scene.scheduler->index().counts(StoreId::kHost).reserved, 0);
  EXPECT_EQ(scene.device.holds(0) + scene.device.holds(1), 0);
  (void)scene.offer({1, 2}, {0, 1});
  scene.drain();
  EXPECT_EQ(scene.hits({1, 2}), 2);
}

TEST_P(OffloadSchedulerTest, ABatchEndsAlsoIfThereIsNoMemoryToMakeRoomForIt) {
  OffloadScene& scene = this->scene({.rank = {.host_slots = 1}});
  scene.compute(0, 10);
  (void)scene.offer({1}, {0});
  scene.drain();
  const uint32_t request = scene.scheduler->begin_request("r");
  ASSERT_EQ(scene.scheduler->match(request, scene.keys_of({1}), 0), 1);  // pins the only slot
  scene.compute(1, 20);
  scene.scheduler->on_no_room([]() -> bool { throw std::bad_alloc(); });
  const TransferHandle handle = scene.offer({2}, {1});
  (void)scene.send();
  scene.scheduler->on_no_room(nullptr);
  EXPECT_EQ(handle.count(BlockOutcome::kNoRoom), 1u);
  EXPECT_EQ(scene.device.holds(1), 0);
}

TEST_P(OffloadSchedulerTest, S3AfterAnUnprovenCopyBothSidesAreNeverUsedAgain) {
  OffloadScene& scene = this->scene({.rank = {.host_slots = 2}});
  scene.compute(0, 10);
  const TransferHandle handle = scene.offer({1}, {0});
  scene.ranks[0]->device().drain_as(Drain::kUnproven);
  scene.drain();
  scene.ranks[0]->device().drain_as(Drain::kCompleted);
  EXPECT_EQ(handle.count(BlockOutcome::kUnproven), 1u);
  EXPECT_EQ(scene.device.holds(0), eager() ? 1 : 0);
  EXPECT_EQ(scene.scheduler->quarantined(), 1);
  EXPECT_EQ(scene.scheduler->index().counts(StoreId::kHost).quarantined, 1);
}

TEST_P(OffloadSchedulerTest, S3ALoadPinsItsSlotsUntilEveryRankIsDone) {
  OffloadScene& scene = this->scene({.rank = {.host_slots = 1}});
  scene.compute(0, 10);
  (void)scene.offer({1}, {0});
  scene.drain();
  const uint32_t request = scene.scheduler->begin_request("r");
  ASSERT_EQ(scene.scheduler->match(request, scene.keys_of({1}), 0), 1);
  scene.compute(1, 20);
  const TransferHandle other = scene.offer({2}, {1});
  const std::vector<int32_t> blocks{5};
  (void)scene.scheduler->allocated(request, blocks);
  ASSERT_TRUE(scene.send());
  EXPECT_EQ(other.count(BlockOutcome::kNoRoom), 1u);  // the only slot is pinned
  EXPECT_SUCCEEDS(scene.scheduler->apply(scene.report_of(0)));
  EXPECT_TRUE(scene.scheduler->take_loads().empty());
  EXPECT_FALSE(scene.scheduler->finished(request));  // aborted: its blocks are still written on a rank
  EXPECT_EQ(scene.scheduler->stage(request), RequestStage::kFinishing);
  EXPECT_SUCCEEDS(scene.scheduler->apply(scene.report_of(1)));
  ASSERT_EQ(scene.scheduler->take_loads().size(), 1u);
  const TransferHandle again = scene.offer({2}, {1});
  scene.drain();
  EXPECT_EQ(again.count(BlockOutcome::kTransferred), 1u);
}

TEST_P(OffloadSchedulerTest, S7AResetOpensAnotherSpaceAtOnceAndNothingOfBeforeIsFound) {
  OffloadScene& scene = this->scene({.placement = {.disk = true}});
  for (int32_t block = 0; block < 3; ++block) scene.compute(block, 10 + static_cast<uint32_t>(block));
  (void)scene.offer({1}, {0});
  scene.drain();
  (void)scene.offer({2}, {1});
  ASSERT_TRUE(scene.send());  // under way
  TransferHandle queued = scene.offer({3}, {2});
  ASSERT_SUCCEEDS(scene.scheduler->reset());
  for (const auto& rank : scene.ranks) rank->worker().open_space(scene.scheduler->space(), digest_of({}));
  EXPECT_EQ(queued.count(BlockOutcome::kCancelled), 1u);
  scene.drain();
  EXPECT_EQ(scene.hits({1}) + scene.hits({2}), 0);
  for (int32_t block = 0; block < 3; ++block) scene.compute(block, 50 + static_cast<uint32_t>(block));
  (void)scene.offer({1, 2, 3}, {0, 1, 2});
  scene.drain();
  EXPECT_EQ(scene.load({1, 2, 3}, {5, 6, 7}), 3);
  EXPECT_TRUE(scene.all_have(5, 50));
  scene.restart();  // with the space of the beginning: what is of the other one is not found in it
  EXPECT_EQ(scene.hits({3}), 0);
  if (scene.load({1}, {8}) == 1) {
    EXPECT_TRUE(scene.all_have(8, 10));
  }
}

TEST_P(OffloadSchedulerTest, S7ALoadOfBeforeAResetBringsNothing) {
  OffloadScene& scene = this->scene();
  for (const bool under_way : {true, false}) {
    scene.compute(0, 10);
    (void)scene.offer({1}, {0});
    scene.drain();
    const uint32_t request = scene.scheduler->begin_request("r");
    ASSERT_EQ(scene.scheduler->match(request, scene.keys_of({1}), 0), 1);
    const TransferHandle load = scene.scheduler->allocated(request, std::array{5});
    if (under_way) {
      ASSERT_TRUE(scene.send());
    }
    ASSERT_SUCCEEDS(scene.scheduler->reset());
    EXPECT_TRUE(scene.scheduler->take_loads().empty());  // the request waits for the ranks
    scene.drain();
    EXPECT_EQ(load.count(BlockOutcome::kCancelled), under_way ? 0u : 1u);
    const std::vector<EndedLoad> ended = scene.scheduler->take_loads();
    ASSERT_EQ(ended.size(), 1u);
    EXPECT_EQ(ended[0].good_blocks, 0);
    EXPECT_TRUE(scene.scheduler->finished(request));
  }
}

TEST_P(OffloadSchedulerTest, S8WhatHasNoStampIsNoCandidate) {
  OffloadScene& scene = this->scene();
  scene.compute(1, 20);
  scene.device.clear(0);
  const TransferHandle handle = scene.offer({1, 2}, {0, 1});
  scene.drain();
  EXPECT_EQ(handle.count(BlockOutcome::kTransferred), 1u);
  EXPECT_EQ(scene.hits({1}), 0);
  EXPECT_EQ(scene.hits({2}), 1);
}

TEST_P(OffloadSchedulerTest, S11BlocksAreReadOnlyAfterTheStepThatWritesThemAndNotIfItFailed) {
  OffloadScene& scene = this->scene();
  scene.compute(0, 10);
  scene.compute(1, 20);
  const TransferHandle good = scene.offer({1}, {0}, 7);
  const TransferHandle bad = scene.offer({2}, {1}, 8);
  EXPECT_FALSE(scene.send());
  scene.scheduler->acknowledge(7);
  EXPECT_TRUE(scene.send());
  scene.scheduler->fail_step(8);
  scene.drain();
  EXPECT_EQ(good.count(BlockOutcome::kTransferred), 1u);
  EXPECT_EQ(bad.count(BlockOutcome::kPreconditionFailed), 1u);
}

TEST_P(OffloadSchedulerTest, ADamagedBlockIsAMissFromThenOnAndThoseBehindItAreComputed) {
  OffloadScene& scene = this->scene();
  for (int32_t block = 0; block < 3; ++block) scene.compute(block, 10 + static_cast<uint32_t>(block));
  (void)scene.offer({1, 2, 3}, {0, 1, 2});
  scene.drain();
  scene.ranks[1]->worker().store(StoreId::kHost)->view({.offset = 1})[7] ^= std::byte{1};
  EXPECT_EQ(scene.load({1, 2, 3}, {5, 6, 7}), 1);
  EXPECT_TRUE(scene.all_have(5, 10));
  EXPECT_EQ(scene.hits({1, 2}), 1);
  EXPECT_EQ(scene.scheduler->queue().counts(Way::kOnboard)[static_cast<size_t>(BlockOutcome::kDamaged)], 1u);
  (void)scene.offer({2}, {1});
  scene.drain();
  EXPECT_EQ(scene.hits({1, 2, 3}), 3);
}

TEST_P(OffloadSchedulerTest, AMatchMayBeAskedAgainAndWhatIsNotAllocatedIsLetGo) {
  OffloadScene& scene = this->scene({.rank = {.host_slots = 2}});
  scene.compute(0, 10);
  scene.compute(1, 20);
  (void)scene.offer({1, 2}, {0, 1});
  scene.drain();
  const uint32_t request = scene.scheduler->begin_request("r");
  EXPECT_EQ(scene.scheduler->match(request, scene.keys_of({1, 2}), 0), 2);
  EXPECT_EQ(scene.scheduler->match(request, scene.keys_of({1, 2}), 1), 1);
  EXPECT_EQ(scene.scheduler->match(request, scene.keys_of({1, 2}), 0), 2);
  EXPECT_EQ(scene.scheduler->stage(request), RequestStage::kOnboardStaged);
  TransferHandle load = scene.scheduler->allocated(request, std::vector<int32_t>{5});
  EXPECT_EQ(scene.scheduler->stage(request), RequestStage::kOnboarding);
  load.cancel();  // before any plan: nothing moves
  EXPECT_FALSE(scene.send());
  EXPECT_EQ(load.count(BlockOutcome::kCancelled), 1u);
  ASSERT_EQ(scene.scheduler->take_loads().size(), 1u);
  EXPECT_EQ(scene.scheduler->stage(request), RequestStage::kRunning);
  EXPECT_TRUE(scene.scheduler->finished(request));
  scene.compute(2, 30);
  scene.compute(3, 40);
  const TransferHandle both = scene.offer({3, 4}, {2, 3});
  scene.drain();
  EXPECT_EQ(both.count(BlockOutcome::kTransferred), 2u);  // no pin is left
}

TEST_P(OffloadSchedulerTest, TwoRequestsShareSlotsAndEachHasALoadOfItsOwn) {
  OffloadScene& scene = this->scene();
  scene.compute(0, 10);
  (void)scene.offer({1}, {0});
  scene.drain();
  std::vector<uint32_t> requests;
  for (const int32_t block : {5, 6}) {
    requests.push_back(scene.scheduler->begin_request(fmt::format("r{}", block)));
    ASSERT_EQ(scene.scheduler->match(requests.back(), scene.keys_of({1}), 0), 1);
    (void)scene.scheduler->allocated(requests.back(), {{block}});
  }
  scene.drain();
  EXPECT_EQ(scene.scheduler->take_loads().size(), 2u);
  EXPECT_TRUE(scene.all_have(5, 10) && scene.all_have(6, 10));
  EXPECT_EQ(scene.ranks[0]->worker().take_loaded().size(), 2u);
}

TEST_P(OffloadSchedulerTest, ALoadLongerThanTheQueueIsNotRefused) {
  OffloadScene& scene = this->scene({.scheduler = {.queue = {.min_batch_size = 1, .queue_blocks = 2}}});
  std::vector<uint32_t> keys;
  std::vector<int32_t> blocks;
  for (uint32_t i = 0; i < 5; ++i) {
    scene.compute(0, 10 + i);
    (void)scene.offer({i + 1}, {0});
    scene.drain();
    keys.push_back(i + 1);
    blocks.push_back(static_cast<int32_t>(1 + i));
  }
  EXPECT_EQ(scene.load(keys, blocks), 5);
  for (uint32_t i = 0; i < 5; ++i) EXPECT_TRUE(scene.all_have(blocks[i], 10 + i));
}

TEST_P(OffloadSchedulerTest, FrequencyPresenceAndShortHitsAreOptions) {
  OffloadScene& scene =
      this->scene({.scheduler = {.counted_keys = 1024}, .placement = {.min_uses = 2, .min_prefix_tokens = 8}});
  scene.compute(0, 10);
  scene.compute(1, 20);
  EXPECT_EQ(scene.hits({1, 2}), 0);
  EXPECT_EQ(scene.offer({1, 2}, {0, 1}).count(BlockOutcome::kFiltered), 2u);
  EXPECT_EQ(scene.hits({1, 2}), 0);
  const TransferHandle handle = scene.offer({1, 2}, {0, 1});
  scene.drain();
  EXPECT_EQ(handle.count(BlockOutcome::kTransferred), 2u);
  EXPECT_EQ(scene.hits({1}), 0);  // 4 tokens are computed
  EXPECT_EQ(scene.hits({1, 2}), 2);
  EXPECT_EQ(scene.offer({1, 2}, {0, 1}).count(BlockOutcome::kFiltered), 2u);
  OffloadScene& other = this->scene({.placement = {.presence = false}});
  other.compute(0, 10);
  (void)other.offer({1}, {0});
  other.drain();
  const TransferHandle again = other.offer({1}, {0});
  other.drain();
  EXPECT_EQ(again.count(BlockOutcome::kPresent), 1u);
}

// Takes its time for each block.
class SlowPlacement final : public Placement {
 public:
  explicit SlowPlacement(test::ManualClock& clock) : clock_(clock) {}
  StoreMask wanted(const Candidate&) const override {
    clock_.advance(std::chrono::milliseconds(60));
    return StoreMask().add(StoreId::kHost);
  }
  bool worth_loading(int64_t, std::span<const BlockLocations>) const override { return true; }

 private:
  test::ManualClock& clock_;
};

TEST_P(OffloadSchedulerTest, APolicyThatIsTooSlowLetsNothingOfItsContainerGo) {
  test::ManualClock clock;
  const SlowPlacement slow(clock);
  test::FakeDeviceBlocks device(4);
  const auto scheduler =
      value_of(OffloadScheduler::create({.index = {.host_slots = 4}, .mode = GetParam()}, device, slow, clock));
  for (const int32_t block : {0, 1}) device.write(block);
  const std::vector<BlockKey> keys{key_number(1), key_number(2)};
  const std::vector<int32_t> both{0, 1};
  const TransferHandle two = scheduler->offer({.keys = keys, .blocks = both});
  EXPECT_EQ(two.count(BlockOutcome::kPolicyTimeout), 2u);
  const TransferHandle one = scheduler->offer({.keys = std::span(keys).first(1), .blocks = std::span(both).first(1)});
  EXPECT_EQ(one.status(), TransferStatus::kQueued);
}

TEST_P(OffloadSchedulerTest, EventsNameWhatIsStoredWithItsParentAndTierAndWhatIsGone) {
  OffloadScene& scene = this->scene({.rank = {.host_slots = 2}, .scheduler = {.events = 4}});
  for (int32_t block = 0; block < 3; ++block) scene.compute(block, 10 + static_cast<uint32_t>(block));
  const std::array keys{key_number(1), key_number(2)};
  (void)scene.scheduler->offer({.keys = keys, .blocks = std::array{0, 1}, .parent = key_number(9).hash});
  scene.drain();
  BlockEvents events = scene.scheduler->take_events();
  ASSERT_EQ(events.events.size(), 2u);
  EXPECT_EQ(events.events[0].parent, key_number(9).hash);
  EXPECT_TRUE(events.events[1].stored && events.events[1].store == StoreId::kHost);
  EXPECT_EQ(events.events[1].key, key_number(2));
  EXPECT_EQ(events.events[1].parent, key_number(1).hash);
  EXPECT_EQ(events.events[1].tokens, 4);
  (void)scene.offer({3}, {2});
  scene.drain();
  events = scene.scheduler->take_events();
  ASSERT_EQ(events.events.size(), 2u);
  EXPECT_FALSE(events.events[0].stored);
  EXPECT_EQ(events.events[0].key, key_number(1));
  EXPECT_EQ(events.events[1].key, key_number(3));
  for (uint32_t key = 10; key < 16; ++key) {
    scene.compute(4, key);
    (void)scene.offer({key}, {4});
    scene.drain();
  }
  events = scene.scheduler->take_events();
  EXPECT_EQ(events.events.size(), 4u);
  EXPECT_EQ(events.events.size() + events.lost, 12u);
  ASSERT_SUCCEEDS(scene.scheduler->reset());
  EXPECT_TRUE(scene.scheduler->take_events().cleared);
  EXPECT_FALSE(scene.scheduler->take_events().cleared);
}

// It takes what it can: blocks go into host memory and come up from there meanwhile, and what has no place in its queue
// is left out and counted.
TEST(OffloadOnASlowDisk, HostMemoryAndLoadsDoNotWaitForIt) {
  Mutex mutex;
  CondVar changed;
  bool released = false;
  const auto files = make_watched_file_system(
      linux_file_system(), [&](const char* call, const std::string&) TORPOR_NO_THREAD_SAFETY_ANALYSIS -> Status {
        const MutexLock lock(mutex);
        while (!released && std::string_view(call) == "pwrite_all") changed.wait(mutex);
        return ok();
      });
  const test::TemporaryDirectory temporary;
  OffloadScene scene(
      {.ranks = 1,
       .rank = {.host_slots = 8,
                .disk_segments = 4,
                .segment_slots = 4,
                .directory = temporary / "store",
                .files = files.get()},
       .scheduler = {.queue = {.max_batch_size = 1, .min_batch_size = 1, .on_deck_batches = 1, .queue_blocks = 4}},
       .placement = {.disk = true}});
  const auto step_until = [&](const std::function<bool()>& done) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(10);
    while (!done() && std::chrono::steady_clock::now() < end) {
      (void)scene.send();
      EXPECT_SUCCEEDS(scene.scheduler->apply(scene.ranks[0]->worker().poll()));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return done();
  };
  const auto stored = [&] { return scene.scheduler->index().counts(StoreId::kHost).visible; };
  for (int32_t block = 0; block < 8; ++block) {
    scene.compute(block, 10 + static_cast<uint32_t>(block));
    (void)scene.offer({static_cast<uint32_t>(block)}, {block});
    EXPECT_TRUE(step_until([&] { return stored() == block + 1; })) << block;
  }
  const OutcomeCounts& on = scene.scheduler->queue().counts(Way::kDemote);
  EXPECT_EQ(on[static_cast<size_t>(BlockOutcome::kQueueFull)], 2u);  // 2 are under way, 4 wait
  const uint32_t request = scene.scheduler->begin_request("r");
  EXPECT_EQ(scene.scheduler->match(request, scene.keys_of({0, 1}), 0), 2);
  (void)scene.scheduler->allocated(request, std::vector<int32_t>{10, 11});
  std::vector<EndedLoad> ended;
  EXPECT_TRUE(step_until([&] { return !ended.empty() || !(ended = scene.scheduler->take_loads()).empty(); }));
  EXPECT_TRUE(scene.all_have(10, 10) && scene.all_have(11, 11));
  {
    const MutexLock lock(mutex);
    released = true;
    changed.notify_all();
  }
  scene.drain();
  EXPECT_EQ(on[static_cast<size_t>(BlockOutcome::kTransferred)], 6u);
  EXPECT_TRUE(scene.scheduler->finished(request));
}

TEST_P(OffloadSchedulerTest, AReportOfNoRankOrOfOtherJobsIsRefused) {
  OffloadScene& scene = this->scene();
  EXPECT_FAILS(scene.scheduler->apply({.rank = 2}), Code::kInvalidArgument, "2 ranks");
  EXPECT_FAILS(scene.scheduler->apply({.jobs = {{.id = uint64_t{9} << 16}}}), Code::kInvalidArgument,
               "planned otherwise");
  scene.compute(0, 10);
  (void)scene.offer({1}, {0});
  TransferReport report;
  report.jobs.push_back({.id = scene.scheduler->plan_step(true).jobs.at(0).id, .count = 2});
  report.outcomes = {BlockOutcome::kFailed, BlockOutcome::kFailed};
  EXPECT_FAILS(scene.scheduler->apply(report), Code::kInvalidArgument, "planned otherwise");
  report.jobs[0].count = 1;
  EXPECT_SUCCEEDS(scene.scheduler->apply(report));
}

TEST(OffloadSchedulerOptions, EachBadOptionIsRefusedByName) {
  const auto refused = [](auto change, std::string_view name) {
    OffloadSchedulerOptions options{.index = {.host_slots = 4}};
    change(options);
    return test::failed_with(options.validate(), Code::kInvalidArgument, name);
  };
  EXPECT_TRUE(refused([](auto& options) { options.ranks = 0; }, "ranks"));
  EXPECT_TRUE(refused([](auto& options) { options.ranks = 65; }, "ranks"));
  EXPECT_TRUE(refused([](auto& options) { options.block_tokens = 0; }, "block_tokens"));
  EXPECT_TRUE(refused([](auto& options) { options.counted_keys = -1; }, "counted_keys"));
  EXPECT_TRUE(refused([](auto& options) { options.index.host_slots = 0; }, "no store"));
  EXPECT_TRUE(refused([](auto& options) { options.queue.max_batch_size = 0; }, "max_batch_size"));
}

}  // namespace
}  // namespace torpor
