// A sleep over weights that change, or that are not kept: what becomes of KV and requests.
#include <fmt/core.h>

#include "tests/engine/sleep_controller_scene.h"

namespace torpor {
namespace {

using namespace test;

TEST_P(SleepControllerTest, NewWeightsMakeOldKvStaleAndItIsRecomputed) {
  TestEngineOptions other = options();
  SleepingEngine slept = make();
  slept.engine.add("a", {1, 2, 3}, 10);
  for (int i = 0; i < 4; ++i) slept.engine.step();
  const auto before = slept.engine.tokens();
  ASSERT_SUCCEEDS(slept.controller.sleep(preserving(false)));
  ASSERT_SUCCEEDS(slept.controller.wake_up({.tags = {"weights"}}));
  slept.engine.load_weights(2);
  ASSERT_SUCCEEDS(slept.controller.wake_up({.tags = {"kv_cache"}, .old_kv = OldKv::kRecompute}));
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
      EXPECT_FAILS(slept.controller.wake_up({}), Code::kFailedPrecondition, "KV of the old ones");
      EXPECT_TRUE(slept.controller.is_sleeping());
      const SleepReport woken = value_of(slept.controller.wake_up({.old_kv = OldKv::kKeep}));
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

// A refusal undoes what the wake has done so far; a word about KV does not stand for weights that are to be loaded.
TEST_P(SleepControllerTest, NewWeightsWithoutAWordAboutKvAreRefusedAndNothingIsLost) {
  SleepingEngine slept = make();
  add_example_requests(slept.engine);
  for (int i = 0; i < 6; ++i) slept.engine.step();
  ASSERT_SUCCEEDS(slept.controller.sleep({.level = 2, .preserve_state = true}));
  EXPECT_FALSE(value_of(slept.controller.wake_up({.old_kv = OldKv::kRecompute})).fully_awake);
  EXPECT_EQ(value_of(slept.controller.wake_up({})).reload, (std::vector<std::string>{"weights"}));
  ASSERT_SUCCEEDS(slept.controller.sleep({.level = 2, .preserve_state = true}));
  ASSERT_SUCCEEDS(slept.controller.wake_up({.tags = {"weights"}}));
  slept.engine.load_weights(1);
  for (int i = 0; i < 2; ++i) {
    EXPECT_FAILS(slept.controller.wake_up({}), Code::kFailedPrecondition, "KV of the old ones");
    EXPECT_EQ(slept.controller.state().tags.at("kv_cache"), "detached");
  }
  EXPECT_TRUE(value_of(slept.controller.wake_up({.old_kv = OldKv::kKeep})).fully_awake);
  EXPECT_EQ(finish(slept.engine), expected());
  EXPECT_EQ(slept.engine.recomputed(), 0);
}

TEST_P(SleepControllerTest, NewWeightsMayEndTheRequests) {
  for (const int level : {0, 1, 2}) {
    SCOPED_TRACE(level);
    SleepingEngine slept = make();
    const std::vector<int32_t> prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    slept.engine.add("a", prompt, 20);
    for (int i = 0; i < 4; ++i) slept.engine.step();
    ASSERT_SUCCEEDS(slept.controller.sleep({.level = level, .preserve_state = true}));
    if (level > 0) {
      ASSERT_SUCCEEDS(slept.controller.wake_up({.tags = {"weights"}}));
    }
    slept.engine.load_weights(2);
    const SleepReport woken = value_of(slept.controller.wake_up({.old_kv = OldKv::kAbort}));
    EXPECT_TRUE(woken.fully_awake);
    EXPECT_EQ(woken.requests, 1);
    EXPECT_FALSE(slept.engine.step());
    EXPECT_EQ(slept.engine.tokens().at("a").size(), 4U);
    TestEngineOptions other = options();
    other.weights_seed = 2;
    TestEngine oracle(linux_file_system(), other);
    for (TestEngine* engine : {&slept.engine, &oracle}) {
      engine->add("b", prompt, 3);
      engine->run();
    }
    EXPECT_EQ(slept.engine.tokens().at("b"), oracle.tokens().at("b"));
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
      const uint64_t of_a_rank = static_cast<uint64_t>(report.kept_blocks) * kBlockBytes * kKvLayers + kRuntimeBytes;
      EXPECT_EQ(report.saved_bytes, of_a_rank * static_cast<uint64_t>(GetParam().ranks));
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
      EXPECT_FAILS(slept.controller.wake_up({}), Code::kFailedPrecondition, "KV of the old ones");
      EXPECT_TRUE(value_of(slept.controller.wake_up({.old_kv = OldKv::kKeep})).fully_awake);
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
  ASSERT_SUCCEEDS(slept.controller.wake_up({.old_kv = OldKv::kKeep}));
  EXPECT_EQ(finish(slept.engine), expected());
}

}  // namespace
}  // namespace torpor
