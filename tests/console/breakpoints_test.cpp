// SPDX-License-Identifier: Apache-2.0
#include "console/breakpoints.h"

#include <thread>

#include "kvcache/slot_table.h"
#include "tests/support/manual_clock.h"
#include "tests/support/results.h"

namespace torpor::console {
namespace {

using namespace std::chrono_literals;
using test::value_of;

class BreakpointsTest : public testing::Test {
 protected:
  BreakpointsTest() { ring_->watch(&stops_); }
  ~BreakpointsTest() override { ring_->watch(nullptr); }
  void publish(SlotState from, SlotState to, uint32_t request = 1, uint64_t a = 0) {
    (void)port_.record({.type = EventType::kSlot,
                        .from = static_cast<uint8_t>(from),
                        .to = static_cast<uint8_t>(to),
                        .request = request,
                        .a = a});
  }
  // How each stop began and ended, in the order of events.
  std::vector<StopEdge> published() {
    std::vector<Event> events;
    reader_.read(events, true);
    std::vector<StopEdge> edges;
    for (const Event& event : events) {
      if (event.type == EventType::kStop) edges.push_back(static_cast<StopEdge>(event.to));
    }
    return edges;
  }
  test::ManualClock clock_;
  std::unique_ptr<EventRing> ring_ = value_of(EventRing::in_memory({}, 1024));
  EventPort port_{*ring_, clock_};
  EventReader reader_{*ring_};
  Breakpoints stops_{*ring_, clock_};
};

TEST_F(BreakpointsTest, StopAtTheEventThatIsMeantAndAtNoOther) {
  const uint32_t id = value_of(stops_.add({.type = EventType::kSlot,
                                           .from = static_cast<uint8_t>(SlotState::kPrefilling),
                                           .to = static_cast<uint8_t>(SlotState::kDecoding)},
                                          1));
  publish(SlotState::kDecoding, SlotState::kPreempted);
  publish(SlotState::kInitialized, SlotState::kDecoding);
  (void)port_.record({.type = EventType::kStep});
  EXPECT_TRUE(port_.may_step());
  publish(SlotState::kPrefilling, SlotState::kDecoding, 7);
  EXPECT_FALSE(port_.may_step());
  const std::vector<StopRow> stops = stops_.stops();
  ASSERT_EQ(stops.size(), 1u);
  EXPECT_EQ(stops[0].id, id);
  EXPECT_EQ(stops[0].request, 7u);
  EXPECT_EQ(stops[0].event, 4u);
  ASSERT_SUCCEEDS(stops_.resume(id));
  EXPECT_TRUE(port_.may_step());
  publish(SlotState::kPrefilling, SlotState::kDecoding);
  EXPECT_FALSE(port_.may_step());  // each time
  ASSERT_SUCCEEDS(stops_.remove(id));
  EXPECT_TRUE(port_.may_step());
  publish(SlotState::kPrefilling, SlotState::kDecoding);
  EXPECT_TRUE(port_.may_step());
  EXPECT_EQ(published(), (std::vector{StopEdge::kBegun, StopEdge::kResumed, StopEdge::kBegun, StopEdge::kResumed}));
}

TEST_F(BreakpointsTest, CountMatchesBeforeThemAndBetweenThem) {
  (void)value_of(stops_.add({.type = EventType::kSlot, .after = 2, .every = 3}, 1));
  std::vector<int> stopped;
  for (int i = 0; i < 10; ++i) {
    publish(SlotState::kDecoding, SlotState::kDecoding);
    if (!port_.may_step()) stopped.push_back(i);
    (void)stops_.resume_all();
  }
  EXPECT_EQ(stopped, (std::vector{2, 5, 8}));
}

TEST_F(BreakpointsTest, OnceIsOnceAndMakesRoomForOthers) {
  for (uint32_t i = 0; i < 3 * Breakpoints::kMost; ++i) {
    (void)value_of(stops_.add({.type = EventType::kSlot, .once = true}, 1));
    publish(SlotState::kDecoding, SlotState::kDecoding);
    EXPECT_FALSE(port_.may_step());
    EXPECT_EQ(stops_.resume_all(), 1u);
    publish(SlotState::kDecoding, SlotState::kDecoding);
    EXPECT_TRUE(port_.may_step());
  }
}

TEST_F(BreakpointsTest, KnowRequestsByNameThoseOfBeforeToo) {
  port_.text(TextKind::kRequestName, 1, 0, "chat-old");
  port_.text(TextKind::kRequestName, 2, 0, "other");
  (void)value_of(stops_.add({.type = EventType::kSlot, .request = "chat-*"}, 1, {{1, "chat-old"}, {2, "other"}}));
  publish(SlotState::kDecoding, SlotState::kDecoding, 2);
  EXPECT_TRUE(port_.may_step());
  publish(SlotState::kDecoding, SlotState::kDecoding, 1);
  EXPECT_FALSE(port_.may_step());
  (void)stops_.resume_all();
  port_.text(TextKind::kRequestName, 1, 0, "other");  // the number is used again
  port_.text(TextKind::kRequestName, 2, 0, "chat-new");
  publish(SlotState::kDecoding, SlotState::kDecoding, 1);
  EXPECT_TRUE(port_.may_step());
  publish(SlotState::kDecoding, SlotState::kDecoding, 2);
  EXPECT_FALSE(port_.may_step());
}

TEST_F(BreakpointsTest, ALeaseEndsWithoutAnybodysHelp) {
  const uint32_t id = value_of(stops_.pause(10s, 1));
  clock_.advance(9s);
  EXPECT_FALSE(port_.may_step());
  ASSERT_SUCCEEDS(stops_.renew(id, 5s));
  clock_.advance(4s);
  EXPECT_FALSE(port_.may_step());
  clock_.advance(2s);
  EXPECT_TRUE(port_.may_step());  // it is the engine that looks
  EXPECT_FAILS(stops_.renew(id, 5s), Code::kNotFound);
  EXPECT_FAILS(stops_.resume(id), Code::kNotFound, "lease");
  EXPECT_EQ(published(), (std::vector{StopEdge::kBegun, StopEdge::kExpired}));
}

TEST_F(BreakpointsTest, EndWithWhoSetThem) {
  (void)value_of(stops_.pause(10s, 1));
  (void)value_of(stops_.add({.type = EventType::kStep}, 1));
  (void)value_of(stops_.pause(10s, 2));
  (void)value_of(stops_.pause(10s, 0));  // stays
  (void)port_.record({.type = EventType::kStep});
  stops_.drop_owner(1);
  EXPECT_EQ(stops_.stops().size(), 2u);
  EXPECT_TRUE(stops_.list().empty());
  stops_.drop_owner(2);
  stops_.drop_owner(0);
  EXPECT_EQ(stops_.stops().size(), 1u);
  EXPECT_FALSE(port_.may_step());
}

TEST_F(BreakpointsTest, NothingHoldsUpAnOperation) {
  (void)value_of(stops_.pause(10s, 1));
  (void)value_of(stops_.add({.type = EventType::kStep}, 1));
  port_.operation_begins();
  EXPECT_TRUE(port_.may_step());
  (void)port_.record({.type = EventType::kStep});
  EXPECT_TRUE(port_.may_step());
  EXPECT_FAILS(stops_.pause(10s, 1), Code::kUnavailable);
  port_.operation_ended();
  EXPECT_TRUE(port_.may_step());
  (void)port_.record({.type = EventType::kStep});
  EXPECT_FALSE(port_.may_step());
  EXPECT_EQ(published(), (std::vector{StopEdge::kBegun, StopEdge::kOperation, StopEdge::kBegun}));
}

TEST_F(BreakpointsTest, AStoppedEngineTakesSoManySteps) {
  EXPECT_FAILS(stops_.step(1), Code::kFailedPrecondition);
  (void)value_of(stops_.pause(10s, 1));
  ASSERT_SUCCEEDS(stops_.step(2));
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(port_.may_step());
    EXPECT_TRUE(port_.may_step());  // asking is no step
    (void)port_.record({.type = EventType::kStep});
  }
  EXPECT_FALSE(port_.may_step());
}

TEST_F(BreakpointsTest, WhatIsWrongIsNamed) {
  EXPECT_FAILS(stops_.add({.type = EventType::kOperation}, 1), Code::kInvalidArgument);
  EXPECT_FAILS(stops_.add({.type = EventType::kSlot, .request = std::string(64, 'a')}, 1), Code::kInvalidArgument);
  EXPECT_FAILS(stops_.add({.type = EventType::kSlot, .way = 0}, 1), Code::kInvalidArgument, "way");
  EXPECT_FAILS(stops_.add({.type = EventType::kSlot, .lease = 301s}, 1), Code::kInvalidArgument, "lease");
  EXPECT_FAILS(stops_.pause(0s, 1), Code::kInvalidArgument, "lease");
  EXPECT_FAILS(stops_.remove(3), Code::kNotFound);
  for (uint32_t i = 0; i < Breakpoints::kMost; ++i) ASSERT_SUCCEEDS(stops_.add({.type = EventType::kSlot}, 1));
  EXPECT_FAILS(stops_.add({.type = EventType::kSlot}, 1), Code::kResourceExhausted);
}

TEST_F(BreakpointsTest, MayBeChangedWhileEventsAreTold) {
  std::atomic<bool> ended = false;
  std::vector<std::thread> telling;
  for (uint32_t writer = 1; writer <= 2; ++writer) {
    telling.emplace_back([&, writer] {
      while (!ended) {
        port_.text(TextKind::kRequestName, writer, 0, writer == 1 ? "one" : "two");
        publish(SlotState::kDecoding, SlotState::kDecoding, writer);
        (void)port_.may_step();
      }
    });
  }
  for (int round = 0; round < 200; ++round) {
    const uint32_t id = value_of(stops_.add({.type = EventType::kSlot, .request = "t*"}, 1, {{1, "one"}, {2, "two"}}));
    for (const StopRow& stop : stops_.stops()) {
      EXPECT_EQ(stop.request, 2u);
    }
    (void)stops_.resume_all();
    ASSERT_SUCCEEDS(stops_.remove(id));
    EXPECT_TRUE(stops_.list().empty());
  }
  ended = true;
  for (std::thread& each : telling) each.join();
  EXPECT_TRUE(stops_.stops().empty());
  EXPECT_TRUE(port_.may_step());
}

TEST(Globs, MatchTheWhole) {
  EXPECT_TRUE(matches_glob("", ""));
  EXPECT_TRUE(matches_glob("*", ""));
  EXPECT_TRUE(matches_glob("a*c?", "abbcccd"));
  EXPECT_TRUE(matches_glob("*-7", "chat-17-7"));
  EXPECT_FALSE(matches_glob("a*c", "abcd"));
  EXPECT_FALSE(matches_glob("a", "ab"));
  EXPECT_FALSE(matches_glob("?", ""));
}

}  // namespace
}  // namespace torpor::console
