// SPDX-License-Identifier: Apache-2.0
// Each lint with the fault that it is for, and the same without it.
#include "console/lints.h"

#include "engine/phases.h"
#include "kvcache/slot_table.h"
#include "tests/support/manual_clock.h"
#include "tests/support/results.h"

namespace torpor::console {
namespace {

using namespace std::chrono_literals;
using test::value_of;

class LintsTest : public testing::Test {
 protected:
  std::vector<Lint> found(bool is_gone = false) {
    std::vector<Event> events;
    reader_.read(events, true);
    for (const Event& event : events) {
      view_.apply(event);
      lints_.apply(event);
    }
    std::vector<Lint> all;
    for (const Finding& finding : lints_.findings(view_, is_gone)) {
      EXPECT_FALSE(finding.what.empty());
      all.push_back(finding.lint);
    }
    return all;
  }
  void step() { (void)port_.record({.type = EventType::kStep}); }
  void candidate(uint64_t number, CandidateState to, Way way = Way::kOffload) {
    (void)port_.record({.type = EventType::kCandidate,
                        .to = static_cast<uint8_t>(to),
                        .transfer = static_cast<uint64_t>(way) << 48 | number,
                        .a = 4});
  }
  void ended(Way way, BlockOutcome outcome, uint64_t blocks) {
    (void)port_.record({.type = EventType::kEnded,
                        .to = static_cast<uint8_t>(outcome),
                        .transfer = static_cast<uint64_t>(way) << 48 | 1,
                        .a = blocks});
  }
  void operation(Edge edge, uint64_t number = 0) {
    (void)port_.record(
        {.type = EventType::kOperation, .from = 1, .to = static_cast<uint8_t>(edge), .transfer = number});
  }
  test::ManualClock clock_;
  std::unique_ptr<EventRing> ring_ = value_of(EventRing::in_memory({}, 4096));
  EventPort port_{*ring_, clock_};
  EventReader reader_{*ring_};
  EngineView view_;
  Lints lints_;
};
using Found = std::vector<Lint>;

TEST_F(LintsTest, ATransferThatDoesNotEnd) {
  candidate(1, CandidateState::kPromoted);
  clock_.advance(4s);
  step();
  EXPECT_EQ(found(), Found{});
  clock_.advance(2s);
  step();
  EXPECT_EQ(found(), Found{Lint::kSlowTransfer});
  candidate(1, CandidateState::kCompleted);
  EXPECT_EQ(found(), Found{});
}

TEST_F(LintsTest, ATransferThatTakesManyTimesAsLongAsOthers) {
  for (uint64_t i = 1; i <= 20; ++i) {
    candidate(i, CandidateState::kPromoted);
    clock_.advance(20ms);
    candidate(i, CandidateState::kCompleted);
  }
  candidate(99, CandidateState::kPromoted);
  clock_.advance(150ms);
  step();
  EXPECT_EQ(found(), Found{});
  clock_.advance(100ms);
  step();
  EXPECT_EQ(found(), Found{Lint::kSlowTransfer});
}

TEST_F(LintsTest, ARequestThatWaitsWhileOthersDecode) {
  SlotTable table(port_);
  const uint32_t decodes = value_of(table.create("decodes", 4));
  (void)value_of(table.create("waits", 4));
  clock_.advance(40s);
  step();
  EXPECT_EQ(found(), Found{});  // nobody decodes
  ASSERT_SUCCEEDS(table.scheduled(decodes, 3, 1, 4));
  EXPECT_EQ(found(), Found{Lint::kStarved});
}

TEST_F(LintsTest, BlocksThatAreStoredInVain) {
  ended(Way::kOffload, BlockOutcome::kTransferred, 999);
  EXPECT_EQ(found(), Found{});
  ended(Way::kOffload, BlockOutcome::kTransferred, 1);
  EXPECT_EQ(found(), Found{Lint::kStoredInVain});
  ended(Way::kOnboard, BlockOutcome::kTransferred, 20);
  EXPECT_EQ(found(), Found{});
}

TEST_F(LintsTest, ABlockThatComesAndGoes) {
  const auto come = [&](uint8_t key) {
    Event event{.type = EventType::kRegistered};
    event.key.bytes[0] = key;
    (void)port_.record(event);
  };
  for (uint8_t key = 0; key < 100; ++key) come(key);
  come(7);
  clock_.advance(61s);
  come(7);
  EXPECT_EQ(found(), Found{});
  come(7);
  come(7);
  EXPECT_EQ(found(), Found{Lint::kPingPong});
}

// A block that is stored goes to host memory and to disk, and has a block of each group: that is once each.
TEST_F(LintsTest, ABlockThatComesAndGoesBelowTheDevice) {
  const auto come = [&](uint8_t tier, uint64_t group) {
    (void)port_.record({.type = EventType::kRegistered, .from = tier, .key = digest_of({}), .b = group});
  };
  for (const uint8_t tier : {1, 2}) {
    for (const uint64_t group : {0, 1}) {
      come(tier, group);
      come(tier, group);
    }
  }
  for (int i = 0; i < 9; ++i)  // very many at once, after a restart
    (void)port_.record({.type = EventType::kRegistered, .from = 2, .a = both(16, 1000)});
  EXPECT_EQ(found(), Found{});
  come(1, 1);
  EXPECT_EQ(found(), Found{Lint::kPingPong});
}

// Each begins once, at the event after which it is there, and again where it had gone.
TEST_F(LintsTest, EachHasTheMomentAtWhichItBegan) {
  const auto seconds = [&] { return std::chrono::duration<double>(clock_.now()).count(); };
  std::vector<double> expected;
  for (int round = 0; round < 2; ++round) {
    candidate(1, CandidateState::kPromoted);
    clock_.advance(6s);
    step();
    expected.push_back(seconds());
    clock_.advance(1s);
    step();
    clock_.advance(1s);
    candidate(1, CandidateState::kCompleted);
    clock_.advance(1s);
    step();
  }
  operation(Edge::kFailed, 77);
  expected.push_back(seconds());
  SourceEvents source;
  reader_.read(source.events, true);
  std::vector<double> began;
  Found lints;
  for (const LintMoment& moment : lint_moments(source)) {
    began.push_back(static_cast<double>(moment.time) * 1e-9);
    lints.push_back(moment.finding.lint);
  }
  EXPECT_EQ(began, expected);
  EXPECT_EQ(lints, (Found{Lint::kSlowTransfer, Lint::kSlowTransfer, Lint::kOperation}));
}

TEST_F(LintsTest, CopiesThatFailAndCopiesThatNobodyKnowsTheEndOf) {
  (void)port_.record({.type = EventType::kCopy, .from = 0, .to = static_cast<uint8_t>(Edge::kEnd)});
  EXPECT_EQ(found(), Found{});
  (void)port_.record({.type = EventType::kCopy, .from = 0, .to = static_cast<uint8_t>(Edge::kFailed)});
  ended(Way::kOffload, BlockOutcome::kUnproven, 2);
  EXPECT_EQ(found(), (Found{Lint::kFailedCopies, Lint::kUnproven}));
}

TEST_F(LintsTest, OperationsThatFailOrDoNotEnd) {
  operation(Edge::kBegin);
  clock_.advance(61s);
  step();
  EXPECT_EQ(found(), Found{Lint::kSlowOperation});
  operation(Edge::kFailed, 1);
  EXPECT_EQ(found(), Found{Lint::kOperation});
}

// A checkpoint that is written while the engine serves: nothing stands still, however long it takes, as long as it goes
// on; but for the stop in its middle.
TEST_F(LintsTest, ACheckpointBehindTheEngineThatDoesNotEnd) {
  const auto checkpoint = [&](Edge edge, uint64_t number = 0) {
    (void)port_.record(
        {.type = EventType::kOperation, .from = 3, .to = static_cast<uint8_t>(edge), .transfer = number});
  };
  const auto engine = [&](uint8_t from, uint8_t to) {
    (void)port_.record({.type = EventType::kEngine, .from = from, .to = to});
  };
  const auto later = [&](std::chrono::seconds time) {
    clock_.advance(time);
    step();
    return found();
  };
  const uint64_t number = ring_->last_sequence() + 1;
  checkpoint(Edge::kBegin);
  EXPECT_EQ(later(61s), Found{});
  for (int minutes = 0; minutes < 30; minutes += 9) {  // it goes on
    (void)port_.record({.type = EventType::kCopy, .to = static_cast<uint8_t>(Edge::kEnd)});
    EXPECT_EQ(later(9min), Found{});
  }
  EXPECT_EQ(later(1min), Found{Lint::kSlowOperation});  // and no longer
  (void)port_.record(
      {.type = EventType::kPhase, .from = 4, .to = static_cast<uint8_t>(Edge::kBegin), .transfer = number});
  EXPECT_EQ(later(9min), Found{});
  EXPECT_EQ(later(1min), Found{Lint::kSlowOperation});
  engine(0, 1);  // the stop
  EXPECT_EQ(later(59s), Found{});
  EXPECT_EQ(later(1s), Found{Lint::kSlowOperation});
  engine(1, 0);
  (void)port_.record({.type = EventType::kCopy, .to = static_cast<uint8_t>(Edge::kEnd)});
  EXPECT_EQ(found(), Found{});
  checkpoint(Edge::kEnd, number);
  EXPECT_EQ(later(60min), Found{});
  engine(0, 1);
  clock_.advance(1s);
  checkpoint(Edge::kBegin);  // one for which the engine stands still
  EXPECT_EQ(later(60s), Found{Lint::kSlowOperation});
}

TEST_F(LintsTest, AnEngineThatIsStoppedAndEventsThatAreMissing) {
  (void)port_.record({.type = EventType::kStop, .from = 1, .to = 1, .transfer = 3});
  EXPECT_EQ(found(), Found{Lint::kStopped});
  (void)port_.record({.type = EventType::kStop, .from = 1, .to = 2, .transfer = 3});
  EXPECT_EQ(found(), Found{});
  for (int i = 0; i < 5000; ++i) step();
  EXPECT_EQ(found(), Found{Lint::kLost});
}

TEST_F(LintsTest, PinsOfNobody) {
  (void)port_.record({.type = EventType::kTier, .from = 1, .a = both(3, 3)});
  step();
  clock_.advance(61s);
  step();
  EXPECT_EQ(found(), Found{Lint::kIdlePins});
  candidate(1, CandidateState::kPromoted, Way::kDemote);  // whose they are
  step();
  EXPECT_EQ(found(), Found{});
  candidate(1, CandidateState::kCompleted, Way::kDemote);
  (void)port_.record({.type = EventType::kTier, .from = 1});
  clock_.advance(61s);
  step();
  EXPECT_EQ(found(), Found{});
}

TEST_F(LintsTest, PinsOfARequestThatHasFoundThem) {
  SlotTable table(port_);
  const uint32_t slot = value_of(table.create("a", 100));
  ASSERT_SUCCEEDS(table.stage(slot, 3));
  (void)port_.record({.type = EventType::kTier, .from = 1, .a = both(3, 3)});
  clock_.advance(61s);
  step();
  EXPECT_EQ(found(), Found{});
}

TEST_F(LintsTest, AProcessThatEndedAwakeWithRequests) {
  step();
  EXPECT_EQ(found(/*is_gone=*/true), Found{});  // it had none
  SlotTable table(port_);
  (void)value_of(table.create("a", 100));
  EXPECT_EQ(found(/*is_gone=*/false), Found{});
  EXPECT_EQ(found(/*is_gone=*/true), Found{Lint::kEnded});
  (void)port_.record({.type = EventType::kEngine, .to = 2});
  EXPECT_EQ(found(/*is_gone=*/true), Found{});  // asleep: it may have a checkpoint
}

TEST_F(LintsTest, MemoryThatNobodyExplainsAndThatGrows) {
  const auto ledger = [&](uint64_t torpors, uint64_t anybodys) {
    (void)port_.record({.type = EventType::kMemory, .from = static_cast<uint8_t>(MemoryPart::kDevice), .a = torpors});
    (void)port_.record({.type = EventType::kMemory, .from = static_cast<uint8_t>(MemoryPart::kAnybody), .a = anybodys});
  };
  for (uint64_t round = 0; round < 4; ++round) {
    ledger(1 << 30, (1 << 30) + (round << 24));
    EXPECT_EQ(found(), Found{});
    ledger(1 << 20, (2 << 20) + (round << 24));
  }
  EXPECT_EQ(found(), Found{Lint::kUnexplained});
  ledger(1 << 30, 2 << 30);
  ledger(1 << 20, 2 << 20);  // and it is as little as at first
  EXPECT_EQ(found(), Found{});
}

}  // namespace
}  // namespace torpor::console
