// SPDX-License-Identifier: Apache-2.0
#include "console/engine_view.h"

#include <cstring>
#include <random>

#include "allocator/host_device.h"
#include "base/file_system.h"
#include "console/schema.h"
#include "engine/rank_memory.h"
#include "kvcache/block_state.h"
#include "kvcache/slot_table.h"
#include "tests/support/results.h"

namespace torpor::console {
namespace {

using test::value_of;

class View : public testing::Test {
 protected:
  void follow() {
    std::vector<Event> events;
    reader_.read(events, true);
    for (const Event& event : events) view_.apply(event);
  }
  std::unique_ptr<EventRing> ring_ = value_of(EventRing::in_memory({}, 256));
  EventPort port_{*ring_, system_clock()};
  EventReader reader_{*ring_};
  EngineView view_;
};

TEST_F(View, ShowsRequestsByNameAndState) {
  SlotTable table(port_);
  const uint32_t a = value_of(table.create("chatcmpl-0123456789abcdef0123456789abcdef", 10));
  const uint32_t b = value_of(table.create("b", 4));
  ASSERT_SUCCEEDS(table.scheduled(a, 0, 10, 10, 3));
  follow();
  EXPECT_EQ(view_.name_of(a + 1), "chatcmpl-0123456789abcdef0123456789abcdef");
  EXPECT_EQ(view_.slots().at(a + 1).state, SlotState::kPrefilling);
  EXPECT_EQ(view_.slots().at(a + 1).computed_tokens, 10u);
  EXPECT_EQ(view_.slots().at(a + 1).device_blocks, 3u);
  EXPECT_EQ(view_.slots().at(b + 1).state, SlotState::kInitialized);
  ASSERT_SUCCEEDS(table.finish(b));
  follow();
  EXPECT_FALSE(view_.slots().contains(b + 1));
  const auto json = view_.to_json();
  EXPECT_EQ(json["slots"].size(), 1u);
  EXPECT_EQ(json["slots"][0]["state"], "prefilling");
  EXPECT_EQ(json["lost_events"], 0);
}

TEST_F(View, CountsWhatCanBeFoundByTier) {
  const Digest key = digest_of({});
  (void)port_.record({.type = EventType::kRegistered, .key = key, .a = both(4, 7)});
  (void)port_.record({.type = EventType::kRegistered, .from = 1, .key = key, .a = both(4, 2)});
  (void)port_.record({.type = EventType::kRegistered, .from = 2, .a = both(4, 30)});  // that a restart found
  (void)port_.record(
      {.type = EventType::kDropped, .from = 1, .to = static_cast<uint8_t>(DropReason::kDiscarded), .key = key});
  (void)port_.record(
      {.type = EventType::kDropped, .from = 2, .to = static_cast<uint8_t>(DropReason::kCleared), .a = 30});
  follow();
  const auto blocks = view_.to_json()["blocks"];
  EXPECT_EQ(blocks["registered"], 1);
  EXPECT_EQ(blocks["dropped"]["cleared"], 0);
  EXPECT_EQ(blocks["host"]["registered"], 1);
  EXPECT_EQ(blocks["host"]["dropped"]["discarded"], 1);
  EXPECT_EQ(blocks["disk"]["registered"], 30);
  EXPECT_EQ(blocks["disk"]["dropped"]["cleared"], 30);
}

TEST_F(View, HitsOfTheOffloadSchedulerBelongToTheRequestOfTheirName) {
  SlotTable table(port_);
  const uint32_t slot = value_of(table.create("r", 10));
  port_.text(TextKind::kRequestName, event_request(4), 0, "r");
  (void)port_.record({.type = EventType::kHit, .request = event_request(4), .a = 9, .b = both(5, 2)});
  follow();
  EXPECT_EQ(view_.slots().at(slot + 1).host_blocks, 5u);
  EXPECT_EQ(view_.slots().at(slot + 1).disk_blocks, 2u);
}

// Whoever comes late finds the requests, their states and the engine's steps all the same.
TEST_F(View, OfTheLastEventsAloneIsThatOfAllOfThem) {
  SlotTable table(port_);
  const uint32_t old = value_of(table.create("old", 4));
  ASSERT_SUCCEEDS(table.scheduled(old, 0, 4, 4));
  for (int step = 0; step < 5000; ++step) table.step(1, 0, 1, 5);
  EXPECT_GT(ring_->last_sequence(), ring_->capacity() * 4);
  EngineView late;
  std::vector<Event> events;
  EventReader(*ring_).read(events, true);
  for (const Event& event : events) late.apply(event);
  EXPECT_EQ(late.name_of(old + 1), "old");
  EXPECT_EQ(late.slots().at(old + 1).state, SlotState::kPrefilling);
  EXPECT_GT(late.lost(), 0u);
}

// What a rank really tells, before and after its memory went: nothing of before is left.
TEST_F(View, MemoryIsThatOfEachRanksLastOperation) {
  auto device = value_of(make_host_device());
  const auto memory =
      value_of(RankMemory::create(std::move(device), linux_file_system(), {.rank = 3, .events = port_}));
  const DeviceAddress weights = value_of(memory->allocate("weights", "w", 1 << 20));
  (void)value_of(memory->allocate("kv_cache", "k", 1 << 16));
  (void)memory->ledger();
  follow();
  const MemoryRow& row = view_.memory().at(3);
  ASSERT_EQ(row.tags.size(), 2u);
  EXPECT_EQ(row.tags.at(2).name, "weights");
  EXPECT_EQ(row.tags.at(2).region_bytes, 1u << 20);
  EXPECT_EQ(row.tags.at(2).bytes[0], memory->ledger().tags.at("weights").physical_bytes);
  EXPECT_EQ(row.device_bytes, memory->ledger().device_physical_bytes);
  ASSERT_SUCCEEDS(memory->free(weights));
  (void)memory->ledger();
  follow();
  ASSERT_EQ(row.tags.size(), 1u);
  EXPECT_EQ(row.tags.at(1).name, "kv_cache");
  const auto json = view_.to_json()["memory"][0];
  EXPECT_EQ(json["rank"], 3);
  EXPECT_EQ(json["tags"][0]["tag"], "kv_cache");
}

TEST_F(View, ControlCharactersOfNamesReachNoTerminal) {
  SlotTable table(port_);
  const uint32_t slot = value_of(table.create("\x1b[2Jhello\x7f", 4));
  follow();
  EXPECT_EQ(view_.name_of(slot + 1), "\\x1b[2Jhello\\x7f");
}

// Any bytes may be read from a file.
TEST(HostileEvents, AreNeitherBelievedNorDoTheyHarm) {
  std::mt19937_64 random(7);
  EngineView view;
  for (int i = 0; i < 200'000; ++i) {
    Event event;
    uint64_t words[8];
    for (uint64_t& word : words) word = random() >> random() % 64;
    std::memcpy(&event, words, sizeof event);
    if (i % 2 == 0) event.type = static_cast<EventType>(random() % (kEventTypes + 2));
    if (i % 4 == 0) event.from = event.to = static_cast<uint8_t>(random() % 8);
    view.apply(event);
  }
  EXPECT_GT(view.unknown(), 0u);
  EXPECT_FALSE(view.to_json().dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace).empty());
}

TEST(EventSchemas, EachTypeHasOne) {
  for (int i = 1; i < kEventTypes; ++i) {
    const EventSchema* schema = schema_of(static_cast<EventType>(i));
    ASSERT_NE(schema, nullptr) << i;
    EXPECT_FALSE(schema->name.empty());
  }
  EXPECT_EQ(schema_of(static_cast<EventType>(kEventTypes)), nullptr);
  EXPECT_EQ(schema_of(EventType{}), nullptr);
}

}  // namespace
}  // namespace torpor::console
