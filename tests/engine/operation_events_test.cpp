// SPDX-License-Identifier: Apache-2.0
// What sleeps and wakes tell, whatever fails: nothing but the events is looked at, and they must say what the report
// and the controller say.
#include <map>

#include "base/event_ring.h"
#include "tests/support/results.h"
#include "tests/support/sleeping_engine.h"

namespace torpor {
namespace {

using namespace test;

struct PublishedOperation {
  std::string operation;
  Edge ended = Edge::kNone;
  std::vector<std::string> phases;  // that ended and were not undone
  int failed = 0;
  int undone = 0;
  std::string error;
};

// By the number of the operation; fails where the events contradict themselves.
std::map<uint64_t, PublishedOperation> operations_of(const std::vector<Event>& events) {
  std::map<uint64_t, PublishedOperation> all;
  std::map<uint64_t, uint8_t> open;
  for (const Event& event : events) {
    const auto edge = static_cast<Edge>(event.to);
    if (event.type == EventType::kText) {
      all[event.transfer].error += std::string(reinterpret_cast<const char*>(event.key.bytes.data()), 16).c_str();
    } else if (event.type == EventType::kOperation) {
      EXPECT_NE(event.from, 0);
      if (edge == Edge::kBegin) {
        EXPECT_TRUE(all.emplace(event.sequence, PublishedOperation{std::string(kOperationNames[event.from])}).second);
      } else {
        EXPECT_EQ(std::exchange(all.at(event.transfer).ended, edge), Edge::kNone);
        EXPECT_FALSE(open.contains(event.transfer));
      }
    } else if (event.type == EventType::kPhase) {
      EXPECT_NE(event.from, 0) << "a phase that events cannot name";
      PublishedOperation& published = all.at(event.transfer);
      EXPECT_EQ(published.ended, Edge::kNone);
      const std::string name(kPhaseNames[event.from]);
      switch (edge) {
        case Edge::kBegin: EXPECT_TRUE(open.emplace(event.transfer, event.from).second); break;
        case Edge::kEnd:
          EXPECT_EQ(open.at(event.transfer), event.from);
          open.erase(event.transfer);
          published.phases.push_back(name);
          break;
        case Edge::kFailed:
          EXPECT_EQ(open.at(event.transfer), event.from);
          open.erase(event.transfer);
          ++published.failed;
          break;
        case Edge::kUndone:
          EXPECT_EQ(published.phases.back(), name);
          published.phases.pop_back();
          ++published.undone;
          break;
        default: ADD_FAILURE() << "a phase does not end so";
      }
    }
  }
  EXPECT_TRUE(open.empty());
  return all;
}

std::vector<std::string> names_of(const SleepReport& report) {
  std::vector<std::string> names;
  for (const Phase& phase : report.phases) names.push_back(phase.name);
  return names;
}

class OperationEvents : public testing::Test {
 protected:
  std::vector<Event> events() const {
    std::vector<Event> all;
    EventReader(*ring_).read(all, true);
    return all;
  }
  static std::string engine_state(const std::vector<Event>& events) {
    std::string state = "awake";
    for (const Event& event : events) {
      if (event.type != EventType::kEngine) continue;
      EXPECT_EQ(kEngineStates[event.from], state);
      state = kEngineStates[event.to];
    }
    return state;
  }
  std::unique_ptr<EventRing> ring_ = value_of(EventRing::in_memory({}, 1 << 12));
  EventPort port_{*ring_, system_clock()};
  TemporaryDirectory temporary_;
};

TEST_F(OperationEvents, PhasesAreThoseOfTheReports) {
  for (const bool to_disk : {false, true}) {
    SleepingEngine slept(linux_file_system(), temporary_.path(), {}, {}, port_);
    add_example_requests(slept.engine);
    slept.engine.step();
    const uint64_t before = ring_->last_sequence();
    const SleepReport sleep = value_of(slept.controller.sleep({.preserve_state = true, .to_disk = to_disk}));
    const SleepReport wake = value_of(slept.controller.wake_up({}));
    std::vector<Event> since;
    EventReader(*ring_, before).read(since, true);
    const std::map<uint64_t, PublishedOperation> published = operations_of(since);
    ASSERT_EQ(published.size(), 2u);
    EXPECT_EQ(published.begin()->second.operation, "sleep");
    EXPECT_EQ(published.begin()->second.phases, names_of(sleep));
    EXPECT_EQ(published.rbegin()->second.operation, "wake");
    EXPECT_EQ(published.rbegin()->second.phases, names_of(wake));
    for (const auto& [number, each] : published) EXPECT_EQ(each.ended, Edge::kEnd);
    EXPECT_EQ(engine_state(since), "awake");
    for (const SleepReport* report : {&sleep, &wake}) {
      double over = 0;  // when the phase before had ended, seconds after the operation's beginning
      for (const Phase& phase : report->phases) {
        EXPECT_GE(phase.after + 1e-9, over) << phase.name;
        over = phase.after + phase.seconds;
      }
      EXPECT_LE(over, report->seconds + 1e-9);
    }
  }
}

// The device fails at each of its calls, once.
TEST_F(OperationEvents, WhateverFailsIsToldAndWhatIsUndoneToo) {
  int undone = 0;
  int lost = 0;
  for (uint64_t n = 1;; ++n) {
    SCOPED_TRACE(n);
    SleepingEngine slept(linux_file_system(), temporary_.path(), {}, {}, port_);
    add_example_requests(slept.engine);
    slept.engine.step();
    const uint64_t before = ring_->last_sequence();
    slept.engine.device(0).fail_at(n);
    const Result<SleepReport> sleep = slept.controller.sleep({.preserve_state = true});
    const bool fired = slept.engine.device(0).fired();
    std::vector<Event> since;
    EventReader(*ring_, before).read(since, true);
    const std::map<uint64_t, PublishedOperation> published = operations_of(since);
    ASSERT_EQ(published.size(), 1u);
    const PublishedOperation& one = published.begin()->second;
    EXPECT_EQ(engine_state(since), slept.controller.state().engine);
    if (sleep) {
      EXPECT_EQ(one.ended, Edge::kEnd);
      EXPECT_EQ(one.failed + one.undone, 0);
      EXPECT_EQ(one.phases, names_of(*sleep));
    } else {
      EXPECT_FALSE(one.error.empty());
      EXPECT_EQ(one.failed, 1);
      const bool is_lost = slept.controller.state().engine == "unrecoverable";
      EXPECT_EQ(one.ended, is_lost ? Edge::kLost : Edge::kFailed);
      EXPECT_TRUE(is_lost || one.phases.empty()) << "all that was done is undone";
      undone += one.undone;
      lost += is_lost ? 1 : 0;
    }
    slept.engine.device(0).fail_at(0);
    if (!fired) break;
  }
  EXPECT_GT(undone, 3);
  EXPECT_GT(lost, 0);
}

// One that is written while the engine serves is one operation, the stop in its middle.
TEST_F(OperationEvents, ACheckpointBehindTheEngineIsOneOperation) {
  SleepingEngine serving(linux_file_system(), temporary_.path(), {.own_threads = false}, {}, port_);
  add_example_requests(serving.engine);
  for (int i = 0; i < 6; ++i) serving.engine.step();
  SleepReport report;
  const auto played = [&](int stage) {  // cancelled then
    const uint64_t before = ring_->last_sequence();
    EXPECT_SUCCEEDS(serving.controller.begin_checkpoint());
    if (stage > 0) {
      while (value_of(serving.controller.continue_checkpoint()) != CheckpointStage::kReady) serving.engine.step();
    }
    if (stage == 2) serving.engine.fail_hook("rank stop_and_copy");
    const Status taken = stage > 1 ? serving.controller.take_checkpoint({}) : ok();
    serving.engine.fail_hook("");
    EXPECT_EQ(taken.has_value(), stage != 2);
    if (stage == 4) report = value_of(serving.controller.end_checkpoint());
    serving.controller.cancel_checkpoint();
    std::vector<Event> since;
    EventReader(*ring_, before).read(since, true);
    EXPECT_EQ(engine_state(since), "awake");
    const std::map<uint64_t, PublishedOperation> published = operations_of(since);
    EXPECT_EQ(published.size(), 1u);
    EXPECT_EQ(published.begin()->second.operation, "checkpoint");
    return published.begin()->second;
  };
  using Names = std::vector<std::string>;
  const Names whole{"open", "save", "quiesce", "capture", "save", "commit", "verify"};
  for (int stage = 0; stage < 4; ++stage) {
    SCOPED_TRACE(stage);
    const PublishedOperation one = played(stage);
    EXPECT_EQ(one.ended, Edge::kFailed);
    EXPECT_TRUE(one.error == "cancelled" || (stage == 2 && one.error.starts_with("injected"))) << one.error;
    const size_t done = stage == 0 ? 0 : stage == 3 ? 5 : 2;
    EXPECT_EQ(one.phases, Names(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(done)));
    EXPECT_EQ(one.failed, stage == 1 ? 0 : 1);
  }
  const PublishedOperation one = played(4);
  EXPECT_EQ(one.ended, Edge::kEnd);
  EXPECT_EQ(one.phases, whole);
  EXPECT_TRUE(one.error.empty());
  EXPECT_EQ(names_of(report), whole);
  double over = 0, of_stop = 0;
  for (const Phase& phase : report.phases) {
    EXPECT_GE(phase.after + 1e-9, over) << phase.name;
    over = phase.after + phase.seconds;
    if (phase.name == "quiesce") of_stop = phase.after;
    if (phase.name == "capture") of_stop = over - of_stop;
  }
  EXPECT_LE(of_stop, report.seconds + 1e-9);
}

}  // namespace
}  // namespace torpor
