// What sleep and wake mean (docs/semantics.md), with an engine whose tokens depend on every byte.
#include "engine/sleep_controller.h"

#include <thread>

#include <fmt/format.h>

#include "engine/delivery/roll_forward.h"
#include "tests/support/results.h"
#include "tests/support/sanitizers.h"
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

TEST_P(SleepControllerTest, WhereNothingIsSavedOnlyTheTagsThatWereNamedSleep) {
  SleepingEngine slept = make();
  add_example_requests(slept.engine);
  slept.engine.step();
  SleepOptions options = dropping(1, "recompute");
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

// Requests that run go on with the KV that they have; what others may find is gone, and so is what those requests
// compute from now on, since it rests on old KV.
TEST_P(SleepControllerTest, NewRequestsNeverFindKvOfOldWeightsThatRunningOnesKeep) {
  const std::vector<int32_t> prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  for (const bool paused_only : {false, true}) {
    for (const bool told : {false, true}) {
      SCOPED_TRACE(fmt::format("{}, {}", paused_only ? "paused" : "asleep", told ? "told" : "not told"));
      SleepingEngine slept = make();
      slept.engine.add("a", prompt, 20);
      for (int i = 0; i < 4; ++i) slept.engine.step();
      ASSERT_SUCCEEDS(slept.controller.sleep({.level = paused_only ? 0 : 1, .preserve_state = true}));
      if (!paused_only) {
        ASSERT_SUCCEEDS(slept.controller.wake_up({.tags = {"weights"}}));
      }
      slept.engine.load_weights(2, told);
      const SleepReport woken = value_of(slept.controller.wake_up({}));
      EXPECT_NE(woken.note.find("written"), std::string::npos) << woken.note;
      slept.engine.add("same", prompt, 3);
      slept.engine.run();
      EXPECT_EQ(slept.engine.recomputed(), 0);
      std::vector<int32_t> longer = prompt;
      longer.insert(longer.end(), slept.engine.tokens().at("a").begin(), slept.engine.tokens().at("a").end());
      slept.engine.add("longer", longer, 3);
      slept.engine.run();
      TestEngineOptions other = options();
      other.weights_seed = 2;
      TestEngine oracle(linux_file_system(), other);
      oracle.add("same", prompt, 3);
      oracle.add("longer", longer, 3);
      oracle.run();
      EXPECT_EQ(slept.engine.tokens().at("same"), oracle.tokens().at("same"));
      EXPECT_EQ(slept.engine.tokens().at("longer"), oracle.tokens().at("longer"));
    }
  }
}

TEST_P(SleepControllerTest, UnchangedWeightsKeepThePrefixCache) {
  SleepingEngine slept = make();
  add_example_requests(slept.engine);
  slept.engine.run();
  slept.engine.before_hook = [](const std::string& hook) { EXPECT_NE(hook, "retire_prefix"); };
  for (const int level : {0, 1}) {
    ASSERT_SUCCEEDS(slept.controller.sleep({.level = level, .preserve_state = true}));
    EXPECT_EQ(value_of(slept.controller.wake_up({})).note, "");
  }
}

TEST_P(SleepControllerTest, RequestsAreKeptWhileTheirWeightsAreDropped) {
  for (const bool level_2 : {true, false}) {
    for (const bool told : {true, false}) {
      SCOPED_TRACE(fmt::format("{}, {}", level_2 ? "level 2" : "reload", told ? "told" : "not told"));
      SleepingEngine slept = make();
      add_example_requests(slept.engine);
      for (int i = 0; i < 6; ++i) slept.engine.step();
      const SleepOptions options{.level = level_2 ? 2 : 1, .preserve_state = true, .store_weights = level_2};
      const SleepPlan plan = value_of(slept.controller.plan_sleep(options));
      const SleepReport report = value_of(slept.controller.sleep(options));
      EXPECT_EQ(report.saved_bytes, static_cast<uint64_t>(report.kept_blocks) * kBlockBytes * kKvLayers *
                                        static_cast<uint64_t>(GetParam().ranks));
      EXPECT_EQ(plan.save_bytes.contains("weights") ? plan.save_bytes.at("weights") : 0, 0U);
      // All memory is back, but nothing runs on weights that are not there.
      const SleepReport woken = value_of(slept.controller.wake_up({}));
      EXPECT_EQ(woken.reload, (std::vector<std::string>{"weights"}));
      EXPECT_TRUE(woken.changed);
      EXPECT_FALSE(woken.fully_awake);
      EXPECT_FALSE(slept.engine.step());
      const SleepReport again = value_of(slept.controller.wake_up({}));
      EXPECT_EQ(again.reload, (std::vector<std::string>{"weights"}));
      EXPECT_FALSE(again.changed);
      EXPECT_TRUE(slept.controller.is_sleeping());
      slept.engine.load_weights(1, told);
      EXPECT_TRUE(value_of(slept.controller.wake_up({})).fully_awake);
      EXPECT_EQ(finish(slept.engine), expected());
      EXPECT_EQ(slept.engine.recomputed(), 0);
    }
  }
}

TEST_P(SleepControllerTest, WeightsThatWereNotReloadedAreNotTakenForContentByALaterSleep) {
  SleepingEngine slept = make();
  add_example_requests(slept.engine);
  for (int i = 0; i < 6; ++i) slept.engine.step();
  ASSERT_SUCCEEDS(slept.controller.sleep({.level = 2, .preserve_state = true}));
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  ASSERT_SUCCEEDS(slept.controller.sleep(preserving(false)));
  EXPECT_EQ(value_of(slept.controller.wake_up({})).reload, (std::vector<std::string>{"weights"}));
  EXPECT_FALSE(slept.engine.step());
  slept.engine.load_weights(1);
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  EXPECT_EQ(finish(slept.engine), expected());
}

TEST_P(SleepControllerTest, ADeeperSleepFreesWhatItSays) {
  const auto freed = [](const SleepReport& report, const char* tag) {
    uint64_t bytes = 0;
    for (const RankLedger& ledger : report.ledgers) bytes += ledger.tags.at(tag).physical_bytes;
    return bytes == 0;
  };
  struct Case {
    const char* name;
    SleepOptions first, second;
  };
  const std::vector<Case> cases = {
      {"pause, then to host", {.level = 0}, preserving(false)},
      {"pause, then to disk", {.level = 0}, preserving(true)},
      {"pause with state, then to host", {.level = 0, .preserve_state = true}, preserving(false)},
      {"KV, then weights",
       {.preserve_state = true, .tags = {"kv_cache"}},
       {.preserve_state = true, .tags = {"weights"}}},
      {"KV, then all", {.preserve_state = true, .tags = {"kv_cache"}}, preserving(false)},
      {"weights, then KV",
       {.preserve_state = true, .tags = {"weights"}},
       {.preserve_state = true, .tags = {"kv_cache"}}},
      {"weights, then all", {.preserve_state = true, .tags = {"weights"}}, preserving(false)},
  };
  for (const Case& with : cases) {
    SCOPED_TRACE(with.name);
    SleepingEngine slept = make();
    add_example_requests(slept.engine);
    for (int i = 0; i < 6; ++i) slept.engine.step();
    ASSERT_SUCCEEDS(slept.controller.sleep(with.first));
    const SleepPlan plan = value_of(slept.controller.plan_sleep(with.second));
    EXPECT_TRUE(plan.problems.empty());
    const SleepReport report = value_of(slept.controller.sleep(with.second));
    EXPECT_TRUE(report.changed);
    EXPECT_TRUE(freed(report, "weights") && freed(report, "kv_cache"));
    EXPECT_GT(report.freed_bytes, 0U);
    uint64_t planned = 0;
    for (const auto& [tag, bytes] : plan.free_bytes) planned += bytes;
    EXPECT_EQ(planned, report.freed_bytes);
    EXPECT_EQ(slept.controller.state().level, 1);
    EXPECT_EQ(slept.controller.state().checkpoint, report.checkpoint);
    // A third time there is nothing left to free; neither is there for a shallower one.
    for (const SleepOptions& same : {with.second, SleepOptions{.level = 0}}) {
      const SleepReport repeated = value_of(slept.controller.sleep(same));
      EXPECT_FALSE(repeated.changed);
      EXPECT_EQ(repeated.note, "already asleep");
      EXPECT_EQ(repeated.level, 1);
    }
    EXPECT_FALSE(value_of(slept.controller.wake_up({.tags = {"weights"}})).fully_awake);
    EXPECT_FALSE(slept.engine.step());
    EXPECT_TRUE(value_of(slept.controller.wake_up({.tags = {"kv_cache"}})).fully_awake);
    EXPECT_EQ(finish(slept.engine), expected());
    EXPECT_EQ(slept.engine.recomputed(), 0);
  }
}

TEST_P(SleepControllerTest, ADeeperSleepDropsRequestsIfItSaysSo) {
  for (const int level : {0, 1}) {
    SleepingEngine slept = make();
    add_example_requests(slept.engine);
    for (int i = 0; i < 6; ++i) slept.engine.step();
    ASSERT_SUCCEEDS(slept.controller.sleep({.level = level, .preserve_state = true, .tags = {"kv_cache"}}));
    EXPECT_TRUE(value_of(slept.controller.sleep(dropping(1, "abort"))).changed);
    ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    EXPECT_EQ(value_of(slept.engine.unfinished_requests()), 0);
    add_late_request(slept.engine);
    slept.engine.run();
    EXPECT_EQ(slept.engine.tokens().at("late"), expected().at("late"));
  }
}

TEST_P(SleepControllerTest, TagsThatWereWokenCanSleepAgainBeforeTheOthersWake) {
  SleepingEngine slept = make();
  add_example_requests(slept.engine);
  for (int i = 0; i < 6; ++i) slept.engine.step();
  ASSERT_SUCCEEDS(slept.controller.sleep(preserving(false)));
  ASSERT_SUCCEEDS(slept.controller.wake_up({.tags = {"weights"}}));
  EXPECT_TRUE(value_of(slept.controller.sleep(preserving(false))).changed);
  EXPECT_EQ(slept.controller.state().tags.at("weights"), "detached");
  EXPECT_TRUE(value_of(slept.controller.wake_up({})).fully_awake);
  EXPECT_EQ(finish(slept.engine), expected());
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
  for (uint64_t at = 0; at <= calls; at += test::kNextFailure) {
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
