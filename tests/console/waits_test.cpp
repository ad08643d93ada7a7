// SPDX-License-Identifier: Apache-2.0
#include "console/waits.h"

#include "console/breakpoints.h"
#include "engine/phases.h"
#include "kvcache/slot_table.h"
#include "tests/support/results.h"

namespace torpor::console {
namespace {

using test::value_of;

class WaitsTest : public testing::Test {
 protected:
  void candidate(Way way, uint64_t number, CandidateState state, uint64_t blocks, uint32_t request) {
    (void)port_.record({.type = EventType::kCandidate,
                        .to = static_cast<uint8_t>(state),
                        .request = request,
                        .transfer = static_cast<uint64_t>(way) << 48 | number,
                        .a = blocks});
  }
  void stop(StopCause cause, uint32_t request) {
    (void)port_.record({.type = EventType::kStop,
                        .from = static_cast<uint8_t>(cause),
                        .to = static_cast<uint8_t>(StopEdge::kBegun),
                        .request = request,
                        .transfer = 9});
  }
  // Of the request that has this number in the table.
  std::string waits_for(uint32_t slot) {
    std::vector<Event> events;
    reader_.read(events, true);
    for (const Event& event : events) view_.apply(event);
    std::string words = Waits(view_).of(slot + 1);
    return words.substr(0, words.rfind(", 0.0 s"));
  }
  std::unique_ptr<EventRing> ring_ = value_of(EventRing::in_memory({}, 256));
  EventPort port_{*ring_, system_clock()};
  EventReader reader_{*ring_};
  EngineView view_;
  SlotTable table_{port_};
};

TEST_F(WaitsTest, ForItsTurnUntilItIsScheduled) {
  const uint32_t a = value_of(table_.create("a", 10));
  const uint32_t b = value_of(table_.create("b", 10));
  EXPECT_EQ(waits_for(a), "its turn: 2 wait");
  ASSERT_SUCCEEDS(table_.scheduled(a, 0, 10, 10, 3));
  (void)port_.record({.type = EventType::kTier, .from = 0, .a = both(3, 3), .b = both(2, 4)});
  EXPECT_EQ(waits_for(a), "");
  EXPECT_EQ(waits_for(b), "its turn: 1 wait, 6 device blocks are free");
  ASSERT_SUCCEEDS(table_.preempt(a));
  EXPECT_EQ(waits_for(a), "its turn: 2 wait, 6 device blocks are free");
}

TEST_F(WaitsTest, ForBlocksThatAreLoadedForItAndNotForOnesOfOthers) {
  const uint32_t a = value_of(table_.create("a", 10));
  const uint32_t b = value_of(table_.create("b", 10));
  port_.text(TextKind::kRequestName, event_request(4), 0, "a");  // as the scheduler of offloading calls it
  candidate(Way::kOnboard, 1, CandidateState::kQueued, 16, event_request(4));
  candidate(Way::kOnboard, 2, CandidateState::kPromoted, 3, event_request(4));
  candidate(Way::kOffload, 3, CandidateState::kPromoted, 5, 0);
  EXPECT_EQ(waits_for(a), "19 blocks to be loaded, in 2 transfers");
  EXPECT_EQ(waits_for(b), "its turn: 2 wait");
  candidate(Way::kOnboard, 1, CandidateState::kCompleted, 16, event_request(4));
  candidate(Way::kOnboard, 2, CandidateState::kSkipped, 3, event_request(4));
  EXPECT_EQ(waits_for(a), "its turn: 2 wait");
}

TEST_F(WaitsTest, ForAnotherStepOrForCopiesOfItsBlocks) {
  const uint32_t a = value_of(table_.create("a", 10));
  ASSERT_SUCCEEDS(table_.scheduled(a, 0, 10, 10, 3));
  ASSERT_SUCCEEDS(table_.skip(a));
  EXPECT_EQ(waits_for(a), "a later step: the last one was full without it");
  ASSERT_SUCCEEDS(table_.finish(a, true));
  EXPECT_EQ(waits_for(a), "copies of its blocks that are under way");
}

TEST_F(WaitsTest, ForTheStopThatHoldsItAloneAndAllForOneOfTheEngine) {
  const uint32_t a = value_of(table_.create("a", 10));
  const uint32_t b = value_of(table_.create("b", 10));
  stop(StopCause::kHold, a + 1);
  EXPECT_EQ(waits_for(a), "a breakpoint that holds it alone");
  EXPECT_EQ(waits_for(b), "its turn: 2 wait");
  stop(StopCause::kPause, 0);
  EXPECT_EQ(waits_for(b), "the engine: stopped by a pause");
  (void)port_.record({.type = EventType::kEngine, .to = 2});
  EXPECT_EQ(waits_for(a), "the engine: asleep");
}

}  // namespace
}  // namespace torpor::console
