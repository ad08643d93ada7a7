// SPDX-License-Identifier: Apache-2.0
// In which order blocks go, what events tell of them, and what an operator asks.
#include <cstring>
#include <limits>

#include "base/event_ring.h"
#include "tests/kvcache/offload_scheduler_scene.h"

namespace torpor {
namespace {

using namespace test;

// Which blocks came there, in their order.
std::vector<uint32_t> stored(OffloadScene& scene, StoreId store) {
  scene.drain();
  std::vector<uint32_t> numbers;
  for (const BlockEvent& event : scene.scheduler->take_events().events) {
    for (uint32_t number = 0; event.stored && event.store == store && number < 16; ++number)
      if (event.key.hash == key_number(number).hash) numbers.push_back(number);
  }
  return numbers;
}

// Where what waits for the disk is more than one batch takes, the higher priority is there first.
TEST_P(OffloadSchedulerTest, PrioritiesHoldOnTheWayOnToDiskToo) {
  OffloadScene& scene =
      this->scene({.rank = {.host_slots = 8}, .scheduler = {.events = 64}, .placement = {.disk = true}});
  for (int32_t block = 0; block < 4; ++block) scene.compute(block, 10 + static_cast<uint32_t>(block));
  const std::array<int32_t, 4> priorities{-3, 0, 7, 0};
  for (int32_t block = 0; block < 4; ++block)
    (void)scene.offer({static_cast<uint32_t>(block)}, {block}, 0, priorities[static_cast<size_t>(block)]);
  EXPECT_EQ(stored(scene, StoreId::kDisk), (std::vector<uint32_t>{2, 1, 3, 0}));
}

TEST_P(OffloadSchedulerTest, BlocksThatAreSentToDiskKeepTheirParentsAndTheMostUrgentOfThemSaysWhenTheyGo) {
  OffloadScene& scene = this->scene({.rank = {.host_slots = 16, .disk_segments = 4, .segment_slots = 4},
                                     .scheduler = {.queue = {.max_batch_size = 2}, .events = 64},
                                     .placement = {.disk = false}});
  for (int32_t block = 0; block < 6; ++block) scene.compute(block, 10 + static_cast<uint32_t>(block));
  (void)scene.offer({0, 1}, {0, 1});
  (void)scene.offer({2, 3}, {2, 3}, 0, 5);
  (void)scene.offer({4}, {4}, 0, 7);
  (void)scene.offer({5}, {5}, 0, 4);
  EXPECT_EQ(stored(scene, StoreId::kHost), (std::vector<uint32_t>{4, 2, 3, 5, 0, 1}));
  (void)value_of(scene.scheduler->move_on(scene.keys_of({0, 1})));
  (void)value_of(scene.scheduler->move_on(scene.keys_of({2, 3})));
  (void)value_of(scene.scheduler->move_on(scene.keys_of({4, 5})));
  scene.drain();
  const BlockEvents published = scene.scheduler->take_events();
  ASSERT_EQ(published.events.size(), 6u);
  const auto none = decltype(BlockEvent::parent){};
  const std::vector<uint32_t> order{4, 5, 2, 3, 0, 1};
  for (size_t i = 0; i < order.size(); ++i) {
    EXPECT_EQ(published.events[i].store, StoreId::kDisk);
    EXPECT_EQ(published.events[i].key.hash, key_number(order[i]).hash) << i;
    EXPECT_EQ(published.events[i].parent, order[i] == 3   ? key_number(2).hash
                                          : order[i] == 1 ? key_number(0).hash
                                                          : none)
        << i;
  }
}

TEST_P(OffloadSchedulerTest, NobodyIsCalledTheParentOfABlockThatIsNot) {
  OffloadScene& scene = this->scene({.scheduler = {.events = 8}});
  for (int32_t block = 0; block < 3; ++block) scene.compute(block, 10 + static_cast<uint32_t>(block));
  const std::vector<BlockKey> keys = scene.keys_of({3, 2, 1});  // the last block of a request first
  (void)scene.scheduler->offer({.keys = keys, .blocks = std::array{0, 1, 2}, .consecutive = false});
  scene.drain();
  const BlockEvents events = scene.scheduler->take_events();
  ASSERT_EQ(events.events.size(), 3u);
  for (const BlockEvent& event : events.events) EXPECT_EQ(event.parent, decltype(event.parent){});
}

TEST_P(OffloadSchedulerTest, ACandidateThatNeverWasIsNotFoundAndALoadThatIsCancelledBringsNothing) {
  OffloadScene& scene = this->scene();
  scene.compute(0, 10);
  (void)scene.offer({0}, {0});
  scene.drain();
  for (const uint64_t number : {uint64_t{0}, uint64_t{1}, uint64_t{12345}, uint64_t{1} << 48 | 999}) {
    EXPECT_EQ(scene.scheduler->cancel(number).error().code, Code::kNotFound) << number;
  }
  const uint32_t request = scene.scheduler->begin_request("r");
  ASSERT_EQ(scene.scheduler->match(request, scene.keys_of({0}), 0), 1);
  scene.device.clear(4);
  const TransferHandle load = scene.scheduler->allocated(request, std::array{4});
  EXPECT_EQ(value_of(scene.scheduler->cancel(load.number())).blocks, 1u);
  EXPECT_EQ(scene.scheduler->cancel(load.number()).error().code, Code::kNotFound);  // once
  EXPECT_FALSE(scene.scheduler->finished(request));                                 // the ranks have not said so
  scene.drain();
  EXPECT_EQ(load.count(BlockOutcome::kCancelled), 1u);
  EXPECT_EQ(scene.scheduler->cancel(load.number()).error().code, Code::kNotFound);  // it has ended
  const std::vector<EndedLoad> loads = scene.scheduler->take_loads();
  ASSERT_EQ(loads.size(), 1u);
  EXPECT_TRUE(loads[0].cancelled);
  EXPECT_EQ(loads[0].good_blocks, 0);
  EXPECT_EQ(scene.hits({0}), 1);  // it is still stored
  const uint32_t again = scene.scheduler->begin_request("s");
  ASSERT_EQ(scene.scheduler->match(again, scene.keys_of({0}), 0), 1);
  const TransferHandle loaded = scene.scheduler->allocated(again, std::array{4});
  scene.send();
  EXPECT_TRUE(value_of(scene.scheduler->cancel(loaded.number())).committed);  // too late
  scene.drain();
  const std::vector<EndedLoad> whole = scene.scheduler->take_loads();
  ASSERT_EQ(whole.size(), 1u);
  EXPECT_FALSE(whole[0].cancelled);
  EXPECT_EQ(whole[0].good_blocks, 1);
  EXPECT_TRUE(scene.all_have(4, 10));
  EXPECT_TRUE(scene.scheduler->finished(again));
}

TEST_P(OffloadSchedulerTest, ALoadForNoRequestHasNotTheNameOfTheOneThatHadItsNumber) {
  const auto ring = value_of(EventRing::in_memory({}, 256));
  OffloadScene& scene = this->scene({.events = EventPort(*ring, system_clock())});
  const uint32_t request = scene.scheduler->begin_request("chat");
  EXPECT_TRUE(scene.scheduler->finished(request));
  ASSERT_EQ(scene.scheduler->begin_request(""), request);
  std::vector<Event> events;
  EventReader(*ring).read(events, true);
  std::vector<std::string> names;
  for (const Event& event : events) {
    if (event.type != EventType::kText || event.request != event_request(request)) continue;
    const auto* const bytes = reinterpret_cast<const char*>(event.key.bytes.data());
    names.emplace_back(bytes, ::strnlen(bytes, event.key.bytes.size()));
  }
  EXPECT_EQ(names, (std::vector<std::string>{"chat", "(no request)"}));
  EXPECT_TRUE(scene.scheduler->finished(request));
}

// Whatever waits before it: a client's request may have the highest priority that there is.
TEST_P(OffloadSchedulerTest, ALoadWithinTheStepIsInItsPlanBeforeAllThatWaits) {
  OffloadScene& scene =
      this->scene({.rank = {.blocks = 16, .host_slots = 8}, .scheduler = {.queue = {.loading_batches = 2}}});
  for (int32_t block = 0; block < 4; ++block) scene.compute(block, 10 + static_cast<uint32_t>(block));
  (void)scene.offer({0, 1, 2, 3}, {0, 1, 2, 3});
  scene.drain();
  const auto begin = [&](uint32_t key, int32_t priority, bool within_step) {
    const uint32_t request = scene.scheduler->begin_request("r", priority);
    EXPECT_EQ(scene.scheduler->match(request, scene.keys_of({key}), 0), 1);
    const std::array blocks{static_cast<int32_t>(8 + key)};
    (void)scene.scheduler->allocated(request, blocks, within_step);
    return request;
  };
  constexpr int32_t kHighest = std::numeric_limits<int32_t>::max();
  const std::array waiting{begin(0, kHighest, false), begin(1, kHighest, false)};
  ASSERT_TRUE(scene.scheduler->can_load_within_step());
  const uint32_t first = begin(2, 0, true);
  ASSERT_TRUE(scene.scheduler->can_load_within_step());
  const uint32_t second = begin(3, 0, true);
  EXPECT_FALSE(scene.scheduler->can_load_within_step());  // the ranks have room for two
  scene.send();
  EXPECT_TRUE(scene.scheduler->load_is_planned(first) && scene.scheduler->load_is_planned(second));
  for (const uint32_t request : waiting) EXPECT_FALSE(scene.scheduler->load_is_planned(request));
  scene.drain();
  EXPECT_EQ(scene.scheduler->take_loads().size(), 4u);
  for (const uint32_t request : {waiting[0], waiting[1], first, second}) {
    EXPECT_TRUE(scene.scheduler->load_is_planned(request));
    EXPECT_TRUE(scene.scheduler->finished(request));
  }
  for (int32_t block = 0; block < 4; ++block) EXPECT_TRUE(scene.all_have(8 + block, 10 + static_cast<uint32_t>(block)));
}

// A user's policy: it keeps the blocks whose key it knows, or has no answer.
class KnownKeys final : public BlockPolicy {
 public:
  bool choose(PolicyQuestion question, std::string_view request, std::span<const BlockKey> keys,
              std::span<uint8_t> keep) override {
    asked.emplace_back(question, std::string(request), keys.size());
    if (!answers) return false;
    for (size_t i = 0; i < keys.size(); ++i) keep[i] = keys[i] == known ? 1 : 0;
    return true;
  }
  std::vector<std::tuple<PolicyQuestion, std::string, size_t>> asked;
  BlockKey known;
  bool answers = true;
};

TEST_P(OffloadSchedulerTest, APolicyOfAUserChoosesAfterThePlacement) {
  OffloadScene& scene = this->scene();
  KnownKeys policy;
  for (int32_t block = 0; block < 4; ++block) scene.compute(block, 10 + static_cast<uint32_t>(block));
  (void)scene.offer({1}, {0});
  scene.drain();
  const std::vector<BlockKey> keys = scene.keys_of({1, 2, 3});
  policy.known = keys[1];
  scene.scheduler->use_policy(&policy);
  const auto offered = [&] {
    return scene.scheduler->offer({.keys = keys, .blocks = std::array{0, 1, 2}, .request = "chat"});
  };
  const TransferHandle chosen = offered();
  scene.drain();
  using Asked = std::tuple<PolicyQuestion, std::string, size_t>;
  EXPECT_EQ(policy.asked, (std::vector<Asked>{{PolicyQuestion::kStore, "chat", 2}}));  // 1 is there already
  EXPECT_EQ(chosen.count(BlockOutcome::kFiltered), 2u);
  EXPECT_EQ(chosen.count(BlockOutcome::kTransferred), 1u);
  EXPECT_EQ(scene.hits({2}), 1);
  EXPECT_EQ(scene.hits({3}), 0);
  policy.answers = false;  // bypassed
  EXPECT_EQ(offered().count(BlockOutcome::kFiltered), 2u);
  scene.drain();
  EXPECT_EQ(scene.hits({3}), 1);
  scene.scheduler->use_policy(nullptr);
  (void)scene.offer({4}, {3});
  scene.drain();
  EXPECT_EQ(policy.asked.size(), 2u);
}

}  // namespace
}  // namespace torpor
