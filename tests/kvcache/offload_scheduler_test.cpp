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
using test::OffloadRig;
using test::OffloadRigOptions;
using test::OffloadSchedulerTest;
using test::value_of;

INSTANTIATE_TEST_SUITE_P(Mode, OffloadSchedulerTest, ::testing::Values(OffloadMode::kEager, OffloadMode::kLazy),
                         [](const auto& info) { return info.param == OffloadMode::kEager ? "Eager" : "Lazy"; });

TEST_P(OffloadSchedulerTest, BlocksGoDownOnAllRanksAndComeBackUpByteForByte) {
  OffloadRig& rig = this->rig();
  for (int32_t block = 0; block < 3; ++block) rig.compute(block, 10 + static_cast<uint32_t>(block));
  const TransferHandle handle = rig.offer({1, 2, 3}, {0, 1, 2});
  EXPECT_EQ(handle.status(), TransferStatus::kQueued);
  rig.drain();
  EXPECT_EQ(handle.count(BlockOutcome::kTransferred), 3u);
  for (int32_t block = 0; block < 3; ++block) rig.compute(block, 99);
  EXPECT_EQ(rig.load({1, 2, 3, 4}, {5, 6, 7, 8}), 3);
  EXPECT_TRUE(rig.all_have(5, 10) && rig.all_have(6, 11) && rig.all_have(7, 12));
  EXPECT_EQ(rig.scheduler->index().counts(StoreId::kHost).visible, 3);
}

TEST_P(OffloadSchedulerTest, TimesAreThoseFromThePlanToTheLastRanksReportAndOfTheWholeLoad) {
  using namespace std::chrono_literals;
  OffloadRig& rig = this->rig();
  const auto in_two_seconds = [&] {
    ASSERT_TRUE(rig.send());
    for (size_t rank = 0; rank < rig.ranks.size(); ++rank) {
      if (rank + 1 == rig.ranks.size()) rig.clock.advance(2s);
      ASSERT_SUCCEEDS(rig.scheduler->apply(rig.report_of(rank)));
    }
  };
  rig.compute(0, 10);
  (void)rig.offer({1}, {0});
  rig.clock.advance(1s);  // it waits for its step: that is no batch's time
  in_two_seconds();
  const uint32_t request = rig.scheduler->begin_request("r");
  const std::vector<int32_t> blocks{5};
  ASSERT_EQ(rig.scheduler->match(request, rig.keys_of({1}), 0), 1);
  (void)rig.scheduler->allocated(request, blocks);
  rig.clock.advance(1s);  // it is the load's
  in_two_seconds();
  EXPECT_EQ(rig.scheduler->take_loads().size(), 1u);
  const OffloadTimes times = rig.scheduler->take_times();
  EXPECT_EQ(times.batches[static_cast<size_t>(Way::kOffload)], std::vector<double>{2.0});
  EXPECT_EQ(times.batches[static_cast<size_t>(Way::kOnboard)], std::vector<double>{2.0});
  EXPECT_EQ(times.loads, std::vector<double>{3.0});
  EXPECT_TRUE(rig.scheduler->take_times().loads.empty());
  rig.scheduler->loaded(request, blocks);
  EXPECT_TRUE(rig.scheduler->finished(request));
}

TEST_P(OffloadSchedulerTest, CachedTokensAreAddedUpAndRecordedForEachRequest) {
  const auto ring = value_of(EventRing::in_memory({}, 256));
  OffloadRig& rig = this->rig({.events = EventPort(*ring, system_clock())});
  const uint32_t request = rig.scheduler->begin_request("r");
  rig.scheduler->count_cached(request, {.device = 1, .stores = {20, 300, 4000}, .other = 50000});
  EXPECT_TRUE(rig.scheduler->finished(request));
  const uint32_t next = rig.scheduler->begin_request("next");
  rig.scheduler->count_cached(next, {.device = 1, .stores = {2, 3, 4}});
  EXPECT_TRUE(rig.scheduler->finished(next));
  EXPECT_EQ(rig.scheduler->cached(), (CachedTokens{.device = 2, .stores = {22, 303, 4004}, .other = 50000}));
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
  OffloadRig& rig = this->rig();
  rig.compute(0, 10);
  rig.compute(1, 20);  // the same tokens in another batch: an equal key, other bytes
  (void)rig.offer({1}, {0});
  rig.drain();
  const TransferHandle second = rig.offer({1}, {1});
  EXPECT_EQ(second.count(BlockOutcome::kFiltered), 1u);
  BlockIndex& index = rig.scheduler->index();
  EXPECT_GE(index.backing(0, rig.device.version(0)).host, 0);
  EXPECT_EQ(index.backing(1, rig.device.version(1)), BlockLocations());
  const ContentVersion before = rig.device.version(0);
  rig.compute(0, 30);
  EXPECT_EQ(index.backing(0, rig.device.version(0)), BlockLocations());
  EXPECT_GE(index.backing(0, before).host, 0);
  // What was loaded has the bytes of its slot; what was computed meanwhile does not.
  EXPECT_EQ(rig.load({1}, {4}), 1);
  EXPECT_GE(index.backing(4, rig.device.version(4)).host, 0);
}

TEST_P(OffloadSchedulerTest, S1ABlockThatIsWrittenAnewBeforeItsPlanIsNotStored) {
  OffloadRig& rig = this->rig();
  rig.compute(0, 10);
  const TransferHandle handle = rig.offer({1}, {0});
  rig.compute(0, 11);
  rig.drain();
  EXPECT_EQ(handle.count(BlockOutcome::kEvicted), 1u);
  EXPECT_EQ(rig.hits({1}), 0);
}

TEST_P(OffloadSchedulerTest, S1UnderACopyABlockIsHeldOrItsStampDecidesAtTheEnd) {
  OffloadRig& rig = this->rig();
  rig.compute(0, 10);
  rig.compute(1, 20);
  const TransferHandle handle = rig.offer({1, 2}, {0, 1});
  ASSERT_TRUE(rig.send());
  EXPECT_EQ(rig.device.holds(0), eager() ? 1 : 0);
  if (!eager()) rig.compute(0, 11);  // taken by another request before its copy is made
  rig.drain();
  EXPECT_EQ(rig.device.holds(0), 0);
  EXPECT_EQ(handle.count(BlockOutcome::kEvicted), eager() ? 0u : 1u);
  EXPECT_EQ(rig.hits({1}), eager() ? 1 : 0);
  EXPECT_EQ(rig.load({2}, {5}), 1);
  EXPECT_TRUE(rig.all_have(5, 20));
}

TEST_P(OffloadSchedulerTest, I2S2ASlotIsVisibleOnlyAfterEveryRankProvedItsPart) {
  OffloadRig& rig = this->rig();
  rig.compute(0, 10);
  (void)rig.offer({1}, {0});
  ASSERT_TRUE(rig.send());
  const TransferReport first = rig.report_of(0);
  EXPECT_SUCCEEDS(rig.scheduler->apply(first));
  EXPECT_SUCCEEDS(rig.scheduler->apply(first));  // S10: what comes again counts once
  EXPECT_EQ(rig.hits({1}), 0);
  EXPECT_TRUE(rig.scheduler->under_way());
  EXPECT_SUCCEEDS(rig.scheduler->apply(rig.report_of(1)));
  EXPECT_EQ(rig.hits({1}), 1);
  EXPECT_SUCCEEDS(rig.scheduler->apply(first));
  EXPECT_FALSE(rig.scheduler->busy());
}

TEST_P(OffloadSchedulerTest, S2TheFailureOfOneRankMakesASlotInvisibleOnAllAndItsCauseReachesTheHandle) {
  OffloadRig& rig = this->rig();
  rig.compute(0, 10);
  rig.compute(1, 20);
  const TransferHandle handle = rig.offer({1, 2}, {0, 1});
  rig.ranks[1]->device().fail_at(1, true);
  rig.drain();
  rig.ranks[1]->device().fail_at(0);
  EXPECT_EQ(handle.count(BlockOutcome::kFailed), 2u);
  EXPECT_FAILS(handle.cause(), Code::kDevice, "rank 1");
  EXPECT_EQ(rig.hits({1}), 0);
  EXPECT_EQ(rig.scheduler->index().counts(StoreId::kHost).reserved, 0);
  EXPECT_EQ(rig.device.holds(0) + rig.device.holds(1), 0);
  (void)rig.offer({1, 2}, {0, 1});
  rig.drain();
  EXPECT_EQ(rig.hits({1, 2}), 2);
}

TEST_P(OffloadSchedulerTest, S3AfterAnUnprovenCopyBothSidesAreNeverUsedAgain) {
  OffloadRig& rig = this->rig({.rank = {.host_slots = 2}});
  rig.compute(0, 10);
  const TransferHandle handle = rig.offer({1}, {0});
  rig.ranks[0]->device().drain_as(Drain::kUnproven);
  rig.drain();
  rig.ranks[0]->device().drain_as(Drain::kCompleted);
  EXPECT_EQ(handle.count(BlockOutcome::kUnproven), 1u);
  EXPECT_EQ(rig.device.holds(0), eager() ? 1 : 0);
  EXPECT_EQ(rig.scheduler->quarantined(), 1);
  EXPECT_EQ(rig.scheduler->index().counts(StoreId::kHost).quarantined, 1);
}

TEST_P(OffloadSchedulerTest, S3ALoadPinsItsSlotsUntilEveryRankIsDone) {
  OffloadRig& rig = this->rig({.rank = {.host_slots = 1}});
  rig.compute(0, 10);
  (void)rig.offer({1}, {0});
  rig.drain();
  const uint32_t request = rig.scheduler->begin_request("r");
  ASSERT_EQ(rig.scheduler->match(request, rig.keys_of({1}), 0), 1);
  rig.compute(1, 20);
  const TransferHandle other = rig.offer({2}, {1});
  const std::vector<int32_t> blocks{5};
  (void)rig.scheduler->allocated(request, blocks);
  ASSERT_TRUE(rig.send());
  EXPECT_EQ(other.count(BlockOutcome::kNoRoom), 1u);  // the only slot is pinned
  EXPECT_SUCCEEDS(rig.scheduler->apply(rig.report_of(0)));
  EXPECT_TRUE(rig.scheduler->take_loads().empty());
  EXPECT_FALSE(rig.scheduler->finished(request));  // aborted: its blocks are still written on a rank
  EXPECT_EQ(rig.scheduler->stage(request), RequestStage::kFinishing);
  EXPECT_SUCCEEDS(rig.scheduler->apply(rig.report_of(1)));
  ASSERT_EQ(rig.scheduler->take_loads().size(), 1u);
  const TransferHandle again = rig.offer({2}, {1});
  rig.drain();
  EXPECT_EQ(again.count(BlockOutcome::kTransferred), 1u);
}

TEST_P(OffloadSchedulerTest, S7AResetOpensAnotherSpaceAtOnceAndNothingOfBeforeIsFound) {
  OffloadRig& rig = this->rig({.placement = {.disk = true}});
  for (int32_t block = 0; block < 3; ++block) rig.compute(block, 10 + static_cast<uint32_t>(block));
  (void)rig.offer({1}, {0});
  rig.drain();
  (void)rig.offer({2}, {1});
  ASSERT_TRUE(rig.send());  // under way
  TransferHandle queued = rig.offer({3}, {2});
  ASSERT_SUCCEEDS(rig.scheduler->reset());
  for (const auto& rank : rig.ranks) rank->worker().open_space(rig.scheduler->space(), digest_of({}));
  EXPECT_EQ(queued.count(BlockOutcome::kCancelled), 1u);
  rig.drain();
  EXPECT_EQ(rig.hits({1}) + rig.hits({2}), 0);
  for (int32_t block = 0; block < 3; ++block) rig.compute(block, 50 + static_cast<uint32_t>(block));
  (void)rig.offer({1, 2, 3}, {0, 1, 2});
  rig.drain();
  EXPECT_EQ(rig.load({1, 2, 3}, {5, 6, 7}), 3);
  EXPECT_TRUE(rig.all_have(5, 50));
  rig.restart();  // with the space of the beginning: what is of the other one is not found in it
  EXPECT_EQ(rig.hits({3}), 0);
  if (rig.load({1}, {8}) == 1) {
    EXPECT_TRUE(rig.all_have(8, 10));
  }
}

TEST_P(OffloadSchedulerTest, S7ALoadOfBeforeAResetBringsNothing) {
  OffloadRig& rig = this->rig();
  for (const bool under_way : {true, false}) {
    rig.compute(0, 10);
    (void)rig.offer({1}, {0});
    rig.drain();
    const uint32_t request = rig.scheduler->begin_request("r");
    ASSERT_EQ(rig.scheduler->match(request, rig.keys_of({1}), 0), 1);
    const TransferHandle load = rig.scheduler->allocated(request, std::array{5});
    if (under_way) {
      ASSERT_TRUE(rig.send());
    }
    ASSERT_SUCCEEDS(rig.scheduler->reset());
    EXPECT_TRUE(rig.scheduler->take_loads().empty());  // the request waits for the ranks
    rig.drain();
    EXPECT_EQ(load.count(BlockOutcome::kCancelled), under_way ? 0u : 1u);
    const std::vector<EndedLoad> ended = rig.scheduler->take_loads();
    ASSERT_EQ(ended.size(), 1u);
    EXPECT_EQ(ended[0].good_blocks, 0);
    EXPECT_TRUE(rig.scheduler->finished(request));
  }
}

TEST_P(OffloadSchedulerTest, S8WhatHasNoStampIsNoCandidate) {
  OffloadRig& rig = this->rig();
  rig.compute(1, 20);
  rig.device.clear(0);
  const TransferHandle handle = rig.offer({1, 2}, {0, 1});
  rig.drain();
  EXPECT_EQ(handle.count(BlockOutcome::kTransferred), 1u);
  EXPECT_EQ(rig.hits({1}), 0);
  EXPECT_EQ(rig.hits({2}), 1);
}

TEST_P(OffloadSchedulerTest, S11BlocksAreReadOnlyAfterTheStepThatWritesThemAndNotIfItFailed) {
  OffloadRig& rig = this->rig();
  rig.compute(0, 10);
  rig.compute(1, 20);
  const TransferHandle good = rig.offer({1}, {0}, 7);
  const TransferHandle bad = rig.offer({2}, {1}, 8);
  EXPECT_FALSE(rig.send());
  rig.scheduler->acknowledge(7);
  EXPECT_TRUE(rig.send());
  rig.scheduler->fail_step(8);
  rig.drain();
  EXPECT_EQ(good.count(BlockOutcome::kTransferred), 1u);
  EXPECT_EQ(bad.count(BlockOutcome::kPreconditionFailed), 1u);
}

TEST_P(OffloadSchedulerTest, ADamagedBlockIsAMissFromThenOnAndThoseBehindItAreComputed) {
  OffloadRig& rig = this->rig();
  for (int32_t block = 0; block < 3; ++block) rig.compute(block, 10 + static_cast<uint32_t>(block));
  (void)rig.offer({1, 2, 3}, {0, 1, 2});
  rig.drain();
  rig.ranks[1]->worker().store(StoreId::kHost)->view({.offset = 1})[7] ^= std::byte{1};
  EXPECT_EQ(rig.load({1, 2, 3}, {5, 6, 7}), 1);
  EXPECT_TRUE(rig.all_have(5, 10));
  EXPECT_EQ(rig.hits({1, 2}), 1);
  EXPECT_EQ(rig.scheduler->queue().counts(Way::kOnboard)[static_cast<size_t>(BlockOutcome::kDamaged)], 1u);
  (void)rig.offer({2}, {1});
  rig.drain();
  EXPECT_EQ(rig.hits({1, 2, 3}), 3);
}

TEST_P(OffloadSchedulerTest, AMatchMayBeAskedAgainAndWhatIsNotAllocatedIsLetGo) {
  OffloadRig& rig = this->rig({.rank = {.host_slots = 2}});
  rig.compute(0, 10);
  rig.compute(1, 20);
  (void)rig.offer({1, 2}, {0, 1});
  rig.drain();
  const uint32_t request = rig.scheduler->begin_request("r");
  EXPECT_EQ(rig.scheduler->match(request, rig.keys_of({1, 2}), 0), 2);
  EXPECT_EQ(rig.scheduler->match(request, rig.keys_of({1, 2}), 1), 1);
  EXPECT_EQ(rig.scheduler->match(request, rig.keys_of({1, 2}), 0), 2);
  EXPECT_EQ(rig.scheduler->stage(request), RequestStage::kOnboardStaged);
  TransferHandle load = rig.scheduler->allocated(request, std::vector<int32_t>{5});
  EXPECT_EQ(rig.scheduler->stage(request), RequestStage::kOnboarding);
  load.cancel();  // before any plan: nothing moves
  EXPECT_FALSE(rig.send());
  EXPECT_EQ(load.count(BlockOutcome::kCancelled), 1u);
  ASSERT_EQ(rig.scheduler->take_loads().size(), 1u);
  EXPECT_EQ(rig.scheduler->stage(request), RequestStage::kRunning);
  EXPECT_TRUE(rig.scheduler->finished(request));
  rig.compute(2, 30);
  rig.compute(3, 40);
  const TransferHandle both = rig.offer({3, 4}, {2, 3});
  rig.drain();
  EXPECT_EQ(both.count(BlockOutcome::kTransferred), 2u);  // no pin is left
}

TEST_P(OffloadSchedulerTest, TwoRequestsShareSlotsAndEachHasALoadOfItsOwn) {
  OffloadRig& rig = this->rig();
  rig.compute(0, 10);
  (void)rig.offer({1}, {0});
  rig.drain();
  std::vector<uint32_t> requests;
  for (const int32_t block : {5, 6}) {
    requests.push_back(rig.scheduler->begin_request(fmt::format("r{}", block)));
    ASSERT_EQ(rig.scheduler->match(requests.back(), rig.keys_of({1}), 0), 1);
    (void)rig.scheduler->allocated(requests.back(), {{block}});
  }
  rig.drain();
  EXPECT_EQ(rig.scheduler->take_loads().size(), 2u);
  EXPECT_TRUE(rig.all_have(5, 10) && rig.all_have(6, 10));
  EXPECT_EQ(rig.ranks[0]->worker().take_loaded().size(), 2u);
}

TEST_P(OffloadSchedulerTest, FrequencyPresenceAndShortHitsAreOptions) {
  OffloadRig& rig =
      this->rig({.scheduler = {.counted_keys = 1024}, .placement = {.min_uses = 2, .min_prefix_tokens = 8}});
  rig.compute(0, 10);
  rig.compute(1, 20);
  EXPECT_EQ(rig.hits({1, 2}), 0);
  EXPECT_EQ(rig.offer({1, 2}, {0, 1}).count(BlockOutcome::kFiltered), 2u);
  EXPECT_EQ(rig.hits({1, 2}), 0);
  const TransferHandle handle = rig.offer({1, 2}, {0, 1});
  rig.drain();
  EXPECT_EQ(handle.count(BlockOutcome::kTransferred), 2u);
  EXPECT_EQ(rig.hits({1}), 0);  // 4 tokens are computed
  EXPECT_EQ(rig.hits({1, 2}), 2);
  EXPECT_EQ(rig.offer({1, 2}, {0, 1}).count(BlockOutcome::kFiltered), 2u);
  OffloadRig& other = this->rig({.placement = {.presence = false}});
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
  OffloadRig& rig = this->rig({.rank = {.host_slots = 2}, .scheduler = {.events = 4}});
  for (int32_t block = 0; block < 3; ++block) rig.compute(block, 10 + static_cast<uint32_t>(block));
  const std::array keys{key_number(1), key_number(2)};
  (void)rig.scheduler->offer({.keys = keys, .blocks = std::array{0, 1}, .parent = key_number(9).hash});
  rig.drain();
  BlockEvents events = rig.scheduler->take_events();
  ASSERT_EQ(events.events.size(), 2u);
  EXPECT_EQ(events.events[0].parent, key_number(9).hash);
  EXPECT_TRUE(events.events[1].stored && events.events[1].store == StoreId::kHost);
  EXPECT_EQ(events.events[1].key, key_number(2));
  EXPECT_EQ(events.events[1].parent, key_number(1).hash);
  EXPECT_EQ(events.events[1].tokens, 4);
  (void)rig.offer({3}, {2});
  rig.drain();
  events = rig.scheduler->take_events();
  ASSERT_EQ(events.events.size(), 2u);
  EXPECT_FALSE(events.events[0].stored);
  EXPECT_EQ(events.events[0].key, key_number(1));
  EXPECT_EQ(events.events[1].key, key_number(3));
  for (uint32_t key = 10; key < 16; ++key) {
    rig.compute(4, key);
    (void)rig.offer({key}, {4});
    rig.drain();
  }
  events = rig.scheduler->take_events();
  EXPECT_EQ(events.events.size(), 4u);
  EXPECT_EQ(events.events.size() + events.lost, 12u);
  ASSERT_SUCCEEDS(rig.scheduler->reset());
  EXPECT_TRUE(rig.scheduler->take_events().cleared);
  EXPECT_FALSE(rig.scheduler->take_events().cleared);
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
  OffloadRig rig(
      {.ranks = 1,
       .rank = {.host_slots = 8,
                .disk_segments = 4,
                .segment_slots = 4,
                .directory = temporary / "store",
                .files = files.get()},
       .scheduler = {.queue = {.max_batch_size = 1, .min_batch_size = 1, .on_deck_batches = 1, .queue_blocks = 4}},
       .placement = {.disk = true}});
  const auto step_until = [&](const std::function<bool()>& done) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (!done() && std::chrono::steady_clock::now() < end) {
      (void)rig.send();
      EXPECT_SUCCEEDS(rig.scheduler->apply(rig.ranks[0]->worker().poll()));
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return done();
  };
  const auto stored = [&] { return rig.scheduler->index().counts(StoreId::kHost).visible; };
  for (int32_t block = 0; block < 8; ++block) {
    rig.compute(block, 10 + static_cast<uint32_t>(block));
    (void)rig.offer({static_cast<uint32_t>(block)}, {block});
    EXPECT_TRUE(step_until([&] { return stored() == block + 1; })) << block;
  }
  const OutcomeCounts& on = rig.scheduler->queue().counts(Way::kDemote);
  EXPECT_EQ(on[static_cast<size_t>(BlockOutcome::kQueueFull)], 2u);  // 2 are under way, 4 wait
  const uint32_t request = rig.scheduler->begin_request("r");
  EXPECT_EQ(rig.scheduler->match(request, rig.keys_of({0, 1}), 0), 2);
  (void)rig.scheduler->allocated(request, std::vector<int32_t>{10, 11});
  std::vector<EndedLoad> ended;
  EXPECT_TRUE(step_until([&] { return !ended.empty() || !(ended = rig.scheduler->take_loads()).empty(); }));
  EXPECT_TRUE(rig.all_have(10, 10) && rig.all_have(11, 11));
  {
    const MutexLock lock(mutex);
    released = true;
    changed.notify_all();
  }
  rig.drain();
  EXPECT_EQ(on[static_cast<size_t>(BlockOutcome::kTransferred)], 6u);
  EXPECT_TRUE(rig.scheduler->finished(request));
}

TEST_P(OffloadSchedulerTest, AReportOfNoRankOrOfOtherJobsIsRefused) {
  OffloadRig& rig = this->rig();
  EXPECT_FAILS(rig.scheduler->apply({.rank = 2}), Code::kInvalidArgument, "2 ranks");
  EXPECT_FAILS(rig.scheduler->apply({.jobs = {{.id = uint64_t{9} << 16}}}), Code::kInvalidArgument,
               "planned otherwise");
  rig.compute(0, 10);
  (void)rig.offer({1}, {0});
  TransferReport report;
  report.jobs.push_back({.id = rig.scheduler->plan_step(true).jobs.at(0).id, .count = 2});
  report.outcomes = {BlockOutcome::kFailed, BlockOutcome::kFailed};
  EXPECT_FAILS(rig.scheduler->apply(report), Code::kInvalidArgument, "planned otherwise");
  report.jobs[0].count = 1;
  EXPECT_SUCCEEDS(rig.scheduler->apply(report));
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
