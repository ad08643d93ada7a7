// SPDX-License-Identifier: Apache-2.0
// Checkpoints of an engine that serves on, and what was given since the last one.
#include <filesystem>

#include <fmt/core.h>

#include "engine/delivery/roll_forward.h"
#include "tests/engine/sleep_controller_scene.h"
#include "tests/support/sanitizers.h"

namespace torpor {
namespace {

using namespace test;

TEST_P(SleepControllerTest, ACheckpointWhileServingChangesNothing) {
  SleepingEngine serving = make();
  add_example_requests(serving.engine);
  std::string last;
  for (int i = 0; i < kSteps; ++i) {
    serving.engine.step();
    const SleepReport report = value_of(serving.controller.checkpoint({}));
    EXPECT_NE(report.checkpoint, last);
    last = report.checkpoint;
    EXPECT_EQ(report.freed_bytes, 0U);
    EXPECT_EQ(serving.controller.state().engine, "awake");
  }
  EXPECT_EQ(finish(serving.engine), expected());
  EXPECT_EQ(serving.engine.recomputed(), 0);
}

// Answers as a server would have recorded them: what each of the requests has been given.
std::vector<Answer> answers_of(const std::vector<RequestState>& asked, const TestEngine::Tokens& given) {
  std::vector<Answer> answers;
  for (const RequestState& request : asked) {
    Answer& answer = answers.emplace_back(Answer{.request = request});
    if (const auto tokens = given.find(request.id); tokens != given.end())
      answer.request.output_token_ids = tokens->second;
    if (static_cast<int32_t>(answer.request.output_token_ids.size()) == request.max_tokens)
      answer.state = AnswerState::kFinished;
  }
  return answers;
}

// Seeded requests get the tokens of the run that never ended; unseeded ones go on from what they were given.
void expect_no_contradiction(TestEngine& engine, const TestEngine::Tokens& given, const TestEngine::Tokens& expected) {
  engine.set_tokens(given);
  const TestEngine::Tokens tokens = finish(engine);
  for (const auto& [id, whole] : expected) {
    const std::vector<int32_t>& found = tokens.at(id);
    ASSERT_EQ(found.size(), whole.size()) << id;
    if (id != "b" && id != "d") {
      EXPECT_EQ(found, whole) << id;
    }
    if (const auto before = given.find(id); before != given.end()) {
      EXPECT_TRUE(std::equal(before->second.begin(), before->second.end(), found.begin())) << id;
    }
  }
}

TEST_P(SleepControllerTest, AfterAKillRequestsGoOnFromWhatWasGivenSinceTheCheckpoint) {
  for (const int at : {0, 1, 5, 11, 19}) {
    for (const int since : {0, 1, 3, 5}) {
      SCOPED_TRACE(fmt::format("{} steps, checkpoint, {} steps", at, since));
      std::vector<RequestState> asked;
      TestEngine::Tokens given;
      std::string path;
      {
        SleepingEngine killed = make();
        add_example_requests(killed.engine);
        asked = value_of(killed.engine.capture()).scheduler.requests;
        for (int i = 0; i < at; ++i) killed.engine.step();
        path = value_of(killed.controller.checkpoint({})).checkpoint;
        for (int i = 0; i < since; ++i) killed.engine.step();
        given = killed.engine.tokens();
      }
      SleepingEngine woken = make();
      RolledForward rolled;
      value_of(woken.controller.wake_up(
          {.from_checkpoint = path, .catch_up = catch_up_with(answers_of(asked, given), rolled)}));
      EXPECT_EQ(rolled.extended.empty(), since == 0 || at == 0);
      expect_no_contradiction(woken.engine, given, expected());
    }
  }
}

TEST_P(SleepControllerTest, WithoutACheckpointWhatWasGivenIsComputedAnew) {
  for (const int at : {0, 1, 5, 19, 24}) {
    SCOPED_TRACE(at);
    SleepingEngine killed = make();
    add_example_requests(killed.engine);
    const std::vector<RequestState> asked = value_of(killed.engine.capture()).scheduler.requests;
    for (int i = 0; i < at; ++i) killed.engine.step();
    SleepingEngine woken = make();
    RolledForward rolled;
    const SleepReport report = value_of(
        woken.controller.wake_up({.catch_up = catch_up_with(answers_of(asked, killed.engine.tokens()), rolled)}));
    EXPECT_EQ(report.checkpoint, "");
    expect_no_contradiction(woken.engine, killed.engine.tokens(), expected());
  }
}

TEST_P(SleepControllerTest, ACheckpointThatFailsLeavesTheEngineServing) {
  FaultyFileSystem faulty;
  uint64_t calls = 1;  // of a checkpoint; counted in round 0, which fails at none
  for (uint64_t at = 0; at <= calls; at += test::next_failure()) {
    SCOPED_TRACE(at);
    test::TemporaryDirectory directory;
    SleepingEngine serving(faulty, directory.path(), options());
    add_example_requests(serving.engine);
    for (int i = 0; i < 5; ++i) serving.engine.step();
    faulty.plan.set(at == 0 ? Fault::kNone : Fault::kError, at);
    const Result<SleepReport> report = serving.controller.checkpoint({});
    if (at == 0) calls = faulty.plan.calls;
    faulty.plan.clear();
    EXPECT_EQ(serving.controller.state().engine, "awake");
    ASSERT_TRUE(succeeded(serving.controller.checkpoint({}))) << (report ? "" : report.error().to_string());
    serving.engine.run();
    EXPECT_EQ(serving.engine.tokens().at("a"), expected().at("a"));
  }
  EXPECT_GT(calls, 20U);
}

// By all ways that write a checkpoint, and back by the wake.
TEST_P(SleepControllerTest, MetadataIsInTheCheckpointAndInTheReportsOfBoth) {
  for (const std::string_view way : {"sleep", "checkpoint", "while serving"}) {
    SCOPED_TRACE(way);
    const Metadata metadata{{"way", std::string(way)}};
    SleepReport report;
    {
      SleepingEngine slept = make();
      add_example_requests(slept.engine);
      slept.engine.step();
      if (way == "sleep") {
        SleepOptions options = preserving(true);
        options.metadata = metadata;
        report = value_of(slept.controller.sleep(options));
        EXPECT_EQ(value_of(slept.controller.wake_up({})).metadata, metadata);
        EXPECT_TRUE(value_of(slept.controller.sleep(preserving(false))).metadata.empty());
        EXPECT_TRUE(value_of(slept.controller.wake_up({})).metadata.empty());
      } else if (way == "checkpoint") {
        report = value_of(slept.controller.checkpoint({}, {}, {}, metadata));
      } else {
        ASSERT_SUCCEEDS(slept.controller.begin_checkpoint({}, metadata));
        while (value_of(slept.controller.continue_checkpoint()) == CheckpointStage::kCopying) {}
        ASSERT_SUCCEEDS(slept.controller.take_checkpoint({}));
        while (value_of(slept.controller.continue_checkpoint()) == CheckpointStage::kWriting) {}
        report = value_of(slept.controller.end_checkpoint());
      }
    }
    EXPECT_EQ(report.metadata, metadata);
    SleepingEngine woken = make();
    const SleepReport restored = value_of(woken.controller.wake_up({.from_checkpoint = report.checkpoint}));
    EXPECT_EQ(restored.metadata, metadata);
  }
}

// Not one that has served, nor one that has slept, nor where there is no checkpoint.
TEST_P(SleepControllerTest, OnlyAnEngineThatNeverServedFindsACheckpointToWake) {
  SleepingEngine first = make();
  EXPECT_EQ(value_of(first.controller.checkpoint_to_wake()), "");
  add_example_requests(first.engine);
  value_of(first.controller.checkpoint({}));
  EXPECT_EQ(value_of(first.controller.checkpoint_to_wake()), "");  // it has requests
  finish(first.engine);
  EXPECT_EQ(value_of(first.controller.checkpoint_to_wake()), "");  // it had
  SleepingEngine fresh = make();
  EXPECT_EQ(value_of(fresh.controller.checkpoint_to_wake()), temporary_.path());
  value_of(fresh.controller.sleep(preserving(false)));
  EXPECT_EQ(value_of(fresh.controller.checkpoint_to_wake()), "");
  value_of(fresh.controller.wake_up({}));
  {  // once is enough, also if it brought no request, or was thrown away
    SleepingEngine idle = make();
    const std::string empty = value_of(idle.controller.checkpoint({})).checkpoint;
    for (const bool held : {true, false}) {
      SleepingEngine woken = make();
      value_of(woken.controller.wake_up({.from_checkpoint = temporary_.path(), .hold = held}));
      EXPECT_EQ(value_of(woken.engine.unfinished_requests()), 0);
      if (held) {
        ASSERT_SUCCEEDS(woken.controller.end_hold(false));
        EXPECT_EQ(value_of(woken.controller.checkpoint_to_wake()), temporary_.path());
      } else {
        EXPECT_EQ(value_of(woken.controller.checkpoint_to_wake()), "");
      }
    }
    std::filesystem::remove_all(empty);
  }
  value_of(fresh.controller.wake_up({.from_checkpoint = value_of(fresh.controller.checkpoint_to_wake())}));
  EXPECT_EQ(value_of(fresh.controller.checkpoint_to_wake()), "");  // it has requests now
  EXPECT_EQ(finish(fresh.engine), expected());
}

TEST_P(SleepControllerTest, MetadataWithoutACheckpointOrBeyondItsLimitsIsRefused) {
  SleepingEngine serving = make();
  SleepOptions to_host = preserving(false);
  to_host.metadata = {{"run", "7"}};
  EXPECT_TRUE(failed_with(serving.controller.sleep(to_host), Code::kInvalidArgument, "writes none"));
  const Metadata unnamed{{"", "7"}};
  SleepOptions to_disk = preserving(true);
  to_disk.metadata = unnamed;
  EXPECT_TRUE(failed_with(serving.controller.sleep(to_disk), Code::kInvalidArgument, "name"));
  EXPECT_TRUE(failed_with(serving.controller.checkpoint({}, {}, {}, unnamed), Code::kInvalidArgument, "name"));
  EXPECT_TRUE(failed_with(serving.controller.begin_checkpoint({}, unnamed), Code::kInvalidArgument, "name"));
  EXPECT_EQ(serving.controller.state().engine, "awake");
}

TEST_P(SleepControllerTest, AnEngineThatSleepsWritesNoCheckpointWhileServing) {
  SleepingEngine slept = make();
  value_of(slept.controller.sleep(preserving(false)));
  EXPECT_TRUE(failed_with(slept.controller.checkpoint({}), Code::kFailedPrecondition, "asleep"));
  value_of(slept.controller.wake_up({}));
  EXPECT_TRUE(succeeded(slept.controller.checkpoint({})));
}

}  // namespace
}  // namespace torpor
