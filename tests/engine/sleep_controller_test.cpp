// What sleep and wake mean (docs/semantics.md), with an engine whose tokens depend on every byte.
#include "engine/sleep_controller.h"

#include <thread>

#include <fmt/format.h>

#include "tests/support/results.h"
#include "tests/support/sleeping_engine.h"

namespace torpor {
namespace {

using namespace test;

constexpr SleepOptions preserving(bool to_disk) { return {.preserve_state = true, .to_disk = to_disk}; }
SleepOptions dropping(int level, std::string in_flight) { return {.level = level, .in_flight = std::move(in_flight)}; }

struct Variant {
  int ranks;
  bool defer_copies;
};

class SleepControllerTest : public ::testing::TestWithParam<Variant> {
 protected:
  TestEngineOptions options() const { return {.ranks = GetParam().ranks, .defer_copies = GetParam().defer_copies}; }
  SleepingEngine make(std::optional<uint64_t> kv_budget = {}) {
    return SleepingEngine(linux_file_system(), temporary_.path(), options(), kv_budget);
  }
  TestEngine::Tokens expected() const { return uninterrupted(options()); }
  test::TemporaryDirectory temporary_;
};
INSTANTIATE_TEST_SUITE_P(
    Engines, SleepControllerTest, ::testing::Values(Variant{1, false}, Variant{1, true}, Variant{2, false}),
    [](const auto& info) {
      return std::string(info.param.ranks == 2 ? "TwoRanks" : info.param.defer_copies ? "CopiesLate" : "OneRank");
    });

TEST_P(SleepControllerTest, AfterASleepAtAnyStepEveryTokenIsTheSame) {
  for (const bool to_disk : {false, true}) {
    for (int at = 0; at <= kSteps; at += 3) {
      SCOPED_TRACE(testing::Message() << "step " << at << (to_disk ? " to disk" : " to host"));
      SleepingEngine slept = make();
      add_example_requests(slept.engine);
      for (int i = 0; i < at; ++i) slept.engine.step();
      const SleepReport report = value_of(slept.controller.sleep(preserving(to_disk)));
      EXPECT_TRUE(report.changed);
      EXPECT_TRUE(slept.controller.is_sleeping());
      EXPECT_FALSE(slept.engine.step());
      for (const RankLedger& ledger : report.ledgers) EXPECT_EQ(ledger.device_physical_bytes, 0u);
      const SleepReport woken = value_of(slept.controller.wake_up({}));
      EXPECT_TRUE(woken.changed && woken.fully_awake);
      EXPECT_EQ(finish(slept.engine), expected());
      EXPECT_EQ(slept.engine.recomputed(), 0);
    }
  }
}

TEST_P(SleepControllerTest, ManySleepsInOneRunChangeNothing) {
  SleepingEngine slept = make();
  add_example_requests(slept.engine);
  for (int i = 0; i < kSteps; ++i) {
    slept.engine.step();
    ASSERT_SUCCEEDS(slept.controller.sleep(preserving(i % 2 == 0)));
    ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  }
  EXPECT_EQ(finish(slept.engine), expected());
}

TEST_P(SleepControllerTest, ANewEngineGoesOnFromTheCheckpoint) {
  for (int at = 0; at <= 24; at += 4) {
    SCOPED_TRACE(at);
    TestEngine::Tokens delivered;
    std::string path;
    {
      SleepingEngine slept = make();
      add_example_requests(slept.engine);
      for (int i = 0; i < at; ++i) slept.engine.step();
      path = value_of(slept.controller.sleep(preserving(true))).checkpoint;
      delivered = slept.engine.tokens();
    }
    SleepingEngine woken = make();
    const SleepReport report = value_of(woken.controller.wake_up({.from_checkpoint = path}));
    EXPECT_TRUE(report.changed && report.fully_awake);
    EXPECT_EQ(woken.controller.state().tags.at("kv_cache"), "attached");
    woken.engine.set_tokens(delivered);
    EXPECT_EQ(finish(woken.engine), expected());
    EXPECT_EQ(woken.engine.recomputed(), 0);
  }
}

TEST_P(SleepControllerTest, CachedBlocksBeyondTheBudgetLoseTheirHashAndNothingElse) {
  for (const bool to_disk : {false, true}) {
    SleepingEngine slept = make(/*kv_budget=*/kBlockBytes * kKvLayers * 2);
    add_example_requests(slept.engine);
    slept.engine.run();  // all that remains is the prefix cache
    const SleepReport report = value_of(slept.controller.sleep(preserving(to_disk)));
    EXPECT_EQ(report.kept_blocks, 2);
    EXPECT_GT(report.dropped_blocks, 0);
    ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    add_late_request(slept.engine);
    slept.engine.run();
    EXPECT_EQ(slept.engine.tokens(), expected());
  }
}

TEST_P(SleepControllerTest, Level0OnlyPauses) {
  SleepingEngine slept = make();
  add_example_requests(slept.engine);
  slept.engine.step();
  EXPECT_EQ(value_of(slept.controller.sleep({.level = 0})).freed_bytes, 0u);
  EXPECT_FALSE(slept.engine.step());
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  EXPECT_EQ(finish(slept.engine), expected());
}

TEST_P(SleepControllerTest, WithoutPreserveStateRequestsAreAbortedOrRecomputed) {
  SleepingEngine aborted = make();
  add_example_requests(aborted.engine);
  for (int i = 0; i < 5; ++i) aborted.engine.step();
  ASSERT_SUCCEEDS(aborted.controller.sleep(dropping(1, "abort")));
  ASSERT_SUCCEEDS(aborted.controller.wake_up({}));
  EXPECT_EQ(value_of(aborted.engine.unfinished_requests()), 0);

  SleepingEngine recomputed = make();
  add_example_requests(recomputed.engine);
  for (int i = 0; i < 5; ++i) recomputed.engine.step();
  const SleepReport report = value_of(recomputed.controller.sleep(dropping(1, "recompute")));
  EXPECT_EQ(report.saved_bytes, kWeightBytes * static_cast<uint64_t>(GetParam().ranks));  // no KV
  ASSERT_SUCCEEDS(recomputed.controller.wake_up({}));
  EXPECT_EQ(finish(recomputed.engine), expected());
  EXPECT_GT(recomputed.engine.recomputed(), 0);
}

TEST_P(SleepControllerTest, Level2SavesNoWeightsAndSaysWhatToReload) {
  SleepingEngine slept = make();
  add_example_requests(slept.engine);
  slept.engine.step();
  const SleepReport report = value_of(slept.controller.sleep(dropping(2, "recompute")));
  EXPECT_EQ(report.saved_bytes, 0u);
  const SleepReport woken = value_of(slept.controller.wake_up({}));
  EXPECT_EQ(woken.reload, (std::vector<std::string>{"weights"}));
  slept.engine.load_weights(1);
  EXPECT_EQ(finish(slept.engine), expected());
}

TEST_P(SleepControllerTest, TagsWakeOneByOneAndTheEngineRunsOnlyWithAll) {
  SleepingEngine slept = make();
  add_example_requests(slept.engine);
  for (int i = 0; i < 4; ++i) slept.engine.step();
  ASSERT_SUCCEEDS(slept.controller.sleep(preserving(false)));
  const SleepReport first = value_of(slept.controller.wake_up({.tags = {"weights"}}));
  EXPECT_TRUE(first.changed);
  EXPECT_FALSE(first.fully_awake);
  EXPECT_TRUE(slept.controller.is_sleeping());
  EXPECT_EQ(slept.controller.state().tags.at("kv_cache"), "detached");
  EXPECT_FALSE(slept.engine.step());
  EXPECT_FAILS(slept.controller.wake_up({.tags = {"weights"}}), Code::kInvalidArgument, "kv_cache");
  EXPECT_TRUE(value_of(slept.controller.wake_up({.tags = {"kv_cache"}})).fully_awake);
  EXPECT_EQ(finish(slept.engine), expected());
}

TEST_P(SleepControllerTest, OnlyTheKvCacheMaySleep) {
  SleepingEngine slept = make();
  add_example_requests(slept.engine);
  slept.engine.step();
  SleepOptions options = preserving(false);
  options.tags = {"kv_cache"};
  ASSERT_SUCCEEDS(slept.controller.sleep(options));
  EXPECT_EQ(slept.controller.state().tags.at("weights"), "attached");
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  EXPECT_EQ(finish(slept.engine), expected());
}

TEST_P(SleepControllerTest, NewWeightsMakeOldKvStaleAndItIsRecomputed) {
  TestEngineOptions other = options();
  SleepingEngine slept = make();
  slept.engine.add("a", {1, 2, 3}, 10);
  for (int i = 0; i < 4; ++i) slept.engine.step();
  const auto before = slept.engine.tokens();
  ASSERT_SUCCEEDS(slept.controller.sleep(preserving(false)));
  ASSERT_SUCCEEDS(slept.controller.wake_up({.tags = {"weights"}}));
  slept.engine.load_weights(2);
  ASSERT_SUCCEEDS(slept.controller.wake_up({.tags = {"kv_cache"}, .weights_changed = true}));
  slept.engine.run();
  // The oracle: the new weights, given the tokens so far as they are.
  other.weights_seed = 2;
  TestEngine oracle(linux_file_system(), other);
  std::vector<int32_t> prompt = {1, 2, 3};
  prompt.insert(prompt.end(), before.at("a").begin(), before.at("a").end());
  oracle.add("a", prompt, 6);
  oracle.run();
  std::vector<int32_t> expected_tokens = before.at("a");
  expected_tokens.insert(expected_tokens.end(), oracle.tokens().at("a").begin(), oracle.tokens().at("a").end());
  EXPECT_EQ(slept.engine.tokens().at("a"), expected_tokens);
}

TEST_P(SleepControllerTest, PlanningChangesNothingAndTellsTheTruth) {
  SleepingEngine slept = make();
  add_example_requests(slept.engine);
  for (int i = 0; i < 6; ++i) slept.engine.step();
  const SleepPlan plan = value_of(slept.controller.plan_sleep(preserving(false)));
  EXPECT_FALSE(slept.engine.frozen());
  const SleepReport report = value_of(slept.controller.sleep(preserving(false)));
  EXPECT_EQ(plan.requests, report.requests);
  EXPECT_EQ(plan.kept_blocks, report.kept_blocks);
  EXPECT_EQ(plan.save_bytes.at("weights") + plan.save_bytes.at("kv_cache"), report.saved_bytes);
  EXPECT_EQ(plan.free_bytes.at("weights") + plan.free_bytes.at("kv_cache"), report.freed_bytes);
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  EXPECT_EQ(finish(slept.engine), expected());
}

TEST_P(SleepControllerTest, OnlyOneOperationAtATimeAndStateCanAlwaysBeAsked) {
  SleepingEngine slept = make();
  add_example_requests(slept.engine);
  std::vector<std::string> seen;
  slept.engine.before_hook = [&](const std::string& hook) {
    if (hook != "capture" && hook != "rank attach") return;
    std::thread other([&] {
      seen.push_back(slept.controller.state().engine);
      EXPECT_TRUE(slept.controller.is_sleeping());
      EXPECT_FAILS(slept.controller.sleep(preserving(false)), Code::kUnavailable);
      EXPECT_FAILS(slept.controller.wake_up({}), Code::kUnavailable);
      EXPECT_FAILS(slept.controller.plan_sleep({}), Code::kUnavailable);
    });
    other.join();
  };
  ASSERT_SUCCEEDS(slept.controller.sleep(preserving(false)));
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  EXPECT_EQ(seen, (std::vector<std::string>{"falling asleep", "waking"}));
  slept.engine.before_hook = nullptr;
  EXPECT_EQ(finish(slept.engine), expected());
}

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
      const SleepReport report =
          value_of(woken.controller.wake_up({.from_checkpoint = path, .answers = answers_of(asked, given)}));
      EXPECT_EQ(report.rolled.extended.empty(), since == 0 || at == 0);
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
    const SleepReport report =
        value_of(woken.controller.wake_up({.answers = answers_of(asked, killed.engine.tokens())}));
    EXPECT_EQ(report.checkpoint, "");
    expect_no_contradiction(woken.engine, killed.engine.tokens(), expected());
  }
}

TEST_P(SleepControllerTest, ACheckpointThatFailsLeavesTheEngineServing) {
  FaultyFileSystem faulty;
  uint64_t calls = 1;  // of a checkpoint; counted in round 0, which fails at none
  for (uint64_t at = 0; at <= calls; ++at) {
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

TEST_P(SleepControllerTest, AnEngineThatSleepsWritesNoCheckpointWhileServing) {
  SleepingEngine slept = make();
  value_of(slept.controller.sleep(preserving(false)));
  EXPECT_TRUE(failed_with(slept.controller.checkpoint({}), Code::kFailedPrecondition, "asleep"));
  value_of(slept.controller.wake_up({}));
  EXPECT_TRUE(succeeded(slept.controller.checkpoint({})));
}

}  // namespace
}  // namespace torpor
