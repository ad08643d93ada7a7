// SPDX-License-Identifier: Apache-2.0
// A sleep over weights that change, or that are not kept: what becomes of KV and requests.
#include <fmt/core.h>

#include "tests/engine/sleep_controller_scene.h"

namespace torpor {
namespace {

using namespace test;

SleepOptions without_weights() { return {.preserve_state = true, .weights = Weights::kReload}; }

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
  // Expected: the tokens of the new weights, given the tokens so far as they are.
  other.weights_seed = 2;
  TestEngine reference(linux_file_system(), other);
  std::vector<int32_t> prompt = {1, 2, 3};
  prompt.insert(prompt.end(), before.at("a").begin(), before.at("a").end());
  reference.add("a", prompt, 6);
  reference.run();
  std::vector<int32_t> expected_tokens = before.at("a");
  expected_tokens.insert(expected_tokens.end(), reference.tokens().at("a").begin(), reference.tokens().at("a").end());
  EXPECT_EQ(slept.engine.tokens().at("a"), expected_tokens);
}

// Requests that run go on with the KV that they have; what others may find is gone, and so is what those requests
// compute from now on, since it rests on old KV.
TEST_P(SleepControllerTest, NewRequestsNeverFindKvOfOldWeightsThatRunningOnesKeep) {
  const std::vector<int32_t> prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  for (const bool paused_only : {false, true}) {
    for (const bool marked : {false, true}) {
      SCOPED_TRACE(fmt::format("{}, {}", paused_only ? "paused" : "asleep", marked ? "marked" : "not marked"));
      SleepingEngine slept = make();
      slept.engine.add("a", prompt, 20);
      for (int i = 0; i < 4; ++i) slept.engine.step();
      ASSERT_SUCCEEDS(slept.controller.sleep({.level = paused_only ? 0 : 1, .preserve_state = true}));
      if (!paused_only) {
        ASSERT_SUCCEEDS(slept.controller.wake_up({.tags = {"weights"}}));
      }
      slept.engine.load_weights(2, marked);
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
      TestEngine reference(linux_file_system(), other);
      reference.add("same", prompt, 3);
      reference.add("longer", longer, 3);
      reference.run();
      EXPECT_EQ(slept.engine.tokens().at("same"), reference.tokens().at("same"));
      EXPECT_EQ(slept.engine.tokens().at("longer"), reference.tokens().at("longer"));
    }
  }
}

// A refusal undoes what the wake has done so far; a word about KV does not stand for weights that are to be loaded.
TEST_P(SleepControllerTest, NewWeightsWithoutAWordAboutKvAreRefusedAndNothingIsLost) {
  SleepingEngine slept = make();
  add_example_requests(slept.engine);
  for (int i = 0; i < 6; ++i) slept.engine.step();
  ASSERT_SUCCEEDS(slept.controller.sleep(without_weights()));
  EXPECT_FALSE(value_of(slept.controller.wake_up({.old_kv = OldKv::kRecompute})).fully_awake);
  EXPECT_EQ(value_of(slept.controller.wake_up({})).reload, (std::vector<std::string>{"weights"}));
  ASSERT_SUCCEEDS(slept.controller.sleep(without_weights()));
  ASSERT_SUCCEEDS(slept.controller.wake_up({.tags = {"weights"}}));
  slept.engine.load_weights(2);
  for (int i = 0; i < 2; ++i) {
    EXPECT_FAILS(slept.controller.wake_up({}), Code::kFailedPrecondition, "KV of the old ones");
    EXPECT_EQ(slept.controller.state().tags.at("kv_cache"), "detached");
  }
  slept.engine.load_weights(1);
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
    const Weights weights = level == 2 ? Weights::kReload : Weights::kByLevel;
    ASSERT_SUCCEEDS(slept.controller.sleep({.level = level, .preserve_state = true, .weights = weights}));
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
    TestEngine reference(linux_file_system(), other);
    for (TestEngine* engine : {&slept.engine, &reference}) {
      engine->add("b", prompt, 3);
      engine->run();
    }
    EXPECT_EQ(slept.engine.tokens().at("b"), reference.tokens().at("b"));
  }
}

TEST_P(SleepControllerTest, UnchangedWeightsKeepThePrefixCache) {
  SleepingEngine slept = make();
  add_example_requests(slept.engine);
  slept.engine.run();
  slept.engine.before_hook = [](const std::string& hook) { EXPECT_NE(hook, "retire_prefix"); };
  for (const int level : {0, 1, 2}) {
    EXPECT_EQ(value_of(slept.controller.sleep({.level = level, .preserve_state = true})).note, "");
    EXPECT_EQ(value_of(slept.controller.wake_up({})).note, "");
  }
}

TEST_P(SleepControllerTest, RequestsAreKeptWhileTheirWeightsAreDropped) {
  for (const bool others : {false, true}) {
    for (const bool marked : {true, false}) {
      SCOPED_TRACE(fmt::format("{}, {}", others ? "others" : "the same", marked ? "marked" : "not marked"));
      SleepingEngine slept = make();
      add_example_requests(slept.engine);
      for (int i = 0; i < 6; ++i) slept.engine.step();
      const SleepPlan plan = value_of(slept.controller.plan_sleep(without_weights()));
      const SleepReport report = value_of(slept.controller.sleep(without_weights()));
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
      if (others) {
        slept.engine.load_weights(2, marked);
        EXPECT_FAILS(slept.controller.wake_up({}), Code::kFailedPrecondition, "KV of the old ones");
      }
      slept.engine.load_weights(1, marked);
      const SleepReport loaded = value_of(slept.controller.wake_up({}));
      EXPECT_TRUE(loaded.fully_awake);
      EXPECT_EQ(loaded.note, "");
      EXPECT_EQ(finish(slept.engine), expected());
      EXPECT_EQ(slept.engine.recomputed(), 0);
    }
  }
}

// One rule for the core, the plan and what users are told. What `weights` says wins over the level.
TEST_P(SleepControllerTest, Level2KeepsTheWeightsOfRequestsThatAreKept) {
  for (const bool to_disk : {false, true}) {
    for (const int level : {1, 2}) {
      for (const bool preserve : {true, false}) {
        for (const Weights weights : {Weights::kByLevel, Weights::kStore, Weights::kReload}) {
          SCOPED_TRACE(fmt::format("level {}, preserve {}, weights {}, disk {}", level, preserve,
                                   static_cast<int>(weights), to_disk));
          SleepingEngine slept = make();
          add_example_requests(slept.engine);
          for (int i = 0; i < 6; ++i) slept.engine.step();
          const SleepOptions options{.level = level,
                                     .preserve_state = preserve,
                                     .to_disk = to_disk,
                                     .in_flight = preserve ? "freeze" : "recompute",
                                     .weights = weights};
          const bool dropped = weights == Weights::kReload || (weights == Weights::kByLevel && level == 2 && !preserve);
          EXPECT_EQ(value_of(slept.controller.plan_sleep(options)).save_bytes.contains("weights"), !dropped);
          const SleepReport report = value_of(slept.controller.sleep(options));
          const auto named = dropped ? std::vector<std::string>{"weights"} : std::vector<std::string>{};
          EXPECT_EQ(report.reload, named);
          EXPECT_EQ(report.note.empty(), !dropped) << report.note;
          EXPECT_EQ(value_of(slept.controller.sleep(options)).reload, named) << "asked again";
          const SleepReport woken = value_of(slept.controller.wake_up({}));
          EXPECT_EQ(woken.reload, named);
          EXPECT_EQ(woken.note.empty(), !dropped) << woken.note;
          EXPECT_EQ(woken.fully_awake, !dropped || !preserve);
          if (dropped) slept.engine.load_weights(1);
          EXPECT_TRUE(value_of(slept.controller.wake_up({})).fully_awake);
          if (preserve) {
            EXPECT_EQ(finish(slept.engine), expected());
            EXPECT_EQ(slept.engine.recomputed(), 0);
          }
        }
      }
    }
  }
}

// As llama-swap does: sleep, wake, load, reset of the prefix cache, each without a look at what it returned.
TEST_P(SleepControllerTest, WithoutRequestsTheEngineRunsAtOnceAndWhatIsMissingIsSaid) {
  for (const bool used : {false, true}) {
    for (const bool staged : {false, true}) {
      SCOPED_TRACE(fmt::format("{}, {}", used ? "after requests" : "never used", staged ? "staged" : "at once"));
      SleepingEngine slept = make();
      if (used) add_example_requests(slept.engine);
      slept.engine.run();
      ASSERT_SUCCEEDS(slept.controller.sleep(without_weights()));
      testing::internal::CaptureStderr();
      if (staged) {
        const SleepReport first = value_of(slept.controller.wake_up({.tags = {"weights"}}));
        EXPECT_NE(first.note.find("kv_cache; weights without content"), std::string::npos) << first.note;
        slept.engine.load_weights(2);
      }
      const SleepReport woken = value_of(slept.controller.wake_up({}));
      const std::string said = testing::internal::GetCapturedStderr();
      EXPECT_TRUE(woken.fully_awake);
      EXPECT_EQ(woken.reload.empty(), staged);
      EXPECT_EQ(woken.note.find("weights without content") == std::string::npos, staged) << woken.note;
      EXPECT_EQ(said.find("[warning] wake: weights without content") == std::string::npos, staged) << said;
      if (!staged) slept.engine.load_weights(2);
      slept.engine.set_tokens({});
      add_late_request(slept.engine);  // would find KV of the old weights
      slept.engine.run();
      TestEngineOptions other = options();
      other.weights_seed = 2;
      TestEngine reference(linux_file_system(), other);
      add_late_request(reference);
      reference.run();
      EXPECT_EQ(slept.engine.tokens(), reference.tokens());
    }
  }
}

TEST_P(SleepControllerTest, NoDataParallelRankRunsWhileAnotherWaitsForItsWeights) {
  SleepingEngine slept = make();
  ASSERT_SUCCEEDS(slept.controller.sleep(without_weights()));
  EXPECT_FALSE(value_of(slept.controller.wake_up({.others_wait = true})).fully_awake);
  slept.engine.load_weights(1);
  EXPECT_TRUE(value_of(slept.controller.wake_up({.others_wait = true})).fully_awake);
}

TEST_P(SleepControllerTest, TheSameWeightsLoadedAgainLeaveKvAsItIs) {
  for (const Weights weights : {Weights::kStore, Weights::kReload}) {
    for (const bool requests : {true, false}) {
      SCOPED_TRACE(fmt::format("{}, {}", weights == Weights::kStore ? "stored" : "reloaded", requests));
      SleepingEngine slept = make();
      add_example_requests(slept.engine);
      for (int i = 0; i < (requests ? 6 : kSteps); ++i) slept.engine.step();
      ASSERT_SUCCEEDS(slept.controller.sleep({.level = 2, .preserve_state = true, .weights = weights}));
      ASSERT_SUCCEEDS(slept.controller.wake_up({.tags = {"weights"}}));
      slept.engine.load_weights(1);
      bool retired = false;
      slept.engine.before_hook = [&](const std::string& hook) { retired |= hook == "retire_prefix"; };
      EXPECT_TRUE(value_of(slept.controller.wake_up({.tags = {"kv_cache"}})).fully_awake);
      // Weights that go with nobody's KV are not read.
      EXPECT_EQ(retired, weights == Weights::kReload && !requests);
      slept.engine.before_hook = nullptr;
      if (!requests) continue;
      EXPECT_EQ(finish(slept.engine), expected());
      EXPECT_EQ(slept.engine.recomputed(), 0);
    }
  }
}

// Nor are those of an owner who says what becomes of KV: he will again.
TEST_P(SleepControllerTest, DroppedWeightsAreReadOnceAndOnlyWhereThatIsOfUse) {
  SleepingEngine slept = make();
  add_example_requests(slept.engine);
  for (int i = 0; i < 4; ++i) slept.engine.step();
  const uint64_t once = kWeightBytes * static_cast<uint64_t>(GetParam().ranks);
  const auto update = [&](uint64_t seed, OldKv old_kv) {
    ASSERT_SUCCEEDS(slept.controller.sleep(without_weights()));
    ASSERT_SUCCEEDS(slept.controller.wake_up({.tags = {"weights"}}));
    slept.engine.load_weights(seed);
    ASSERT_SUCCEEDS(slept.controller.wake_up({.old_kv = old_kv}));
    slept.engine.step();
  };
  update(1, OldKv::kUnsaid);
  EXPECT_EQ(slept.engine.hashed_bytes(), 2 * once);  // before and after
  update(1, OldKv::kUnsaid);
  EXPECT_EQ(slept.engine.hashed_bytes(), 3 * once);  // they are known by now
  update(2, OldKv::kKeep);
  update(3, OldKv::kRecompute);
  EXPECT_EQ(slept.engine.hashed_bytes(), 3 * once);
  ASSERT_SUCCEEDS(slept.controller.sleep(without_weights()));
  ASSERT_SUCCEEDS(slept.controller.wake_up({.tags = {"weights"}}));
  slept.engine.load_weights(3);
  EXPECT_FAILS(slept.controller.wake_up({}), Code::kFailedPrecondition, "KV of the old ones");
  ASSERT_SUCCEEDS(slept.controller.wake_up({.old_kv = OldKv::kKeep}));
}

// A pause reads nothing: it is known what the weights are, or KV is asked for.
TEST_P(SleepControllerTest, OfAPausedEngineTheWeightsAreKnownOrItIsAsked) {
  for (const bool known : {false, true}) {
    SCOPED_TRACE(known);
    SleepingEngine slept = make();
    add_example_requests(slept.engine);
    for (int i = 0; i < 6; ++i) slept.engine.step();
    if (known) {
      ASSERT_SUCCEEDS(slept.controller.sleep(preserving(false)));
      ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    }
    ASSERT_SUCCEEDS(slept.controller.sleep({.level = 0}));
    slept.engine.load_weights(1);
    if (!known) {
      EXPECT_FAILS(slept.controller.wake_up({}), Code::kFailedPrecondition, "KV of the old ones");
    }
    ASSERT_SUCCEEDS(slept.controller.wake_up({.old_kv = known ? OldKv::kUnsaid : OldKv::kKeep}));
    EXPECT_EQ(finish(slept.engine), expected());
  }
}

// They are those of the KV only if they were not written before the sleep that lets go of them.
TEST_P(SleepControllerTest, WeightsWrittenBetweenAPauseAndASleepAreNotThoseOfTheKv) {
  SleepingEngine slept = make();
  add_example_requests(slept.engine);
  for (int i = 0; i < 6; ++i) slept.engine.step();
  ASSERT_SUCCEEDS(slept.controller.sleep({.level = 0}));
  slept.engine.load_weights(2);
  ASSERT_SUCCEEDS(slept.controller.sleep(without_weights()));
  ASSERT_SUCCEEDS(slept.controller.wake_up({.tags = {"weights"}}));
  slept.engine.load_weights(2);
  EXPECT_FAILS(slept.controller.wake_up({}), Code::kFailedPrecondition, "KV of the old ones");
  EXPECT_TRUE(value_of(slept.controller.wake_up({.old_kv = OldKv::kAbort})).fully_awake);
}

// Another engine would take the KV for that of the weights that the checkpoint names.
TEST_P(SleepControllerTest, NoCheckpointPairsKvOfOldWeightsWithNewOnes) {
  for (const bool paused : {true, false}) {
    SCOPED_TRACE(paused ? "paused" : "woken without its weights");
    SleepingEngine slept = make();
    add_example_requests(slept.engine);
    for (int i = 0; i < 6; ++i) slept.engine.step();
    if (paused) {
      ASSERT_SUCCEEDS(slept.controller.sleep({.level = 0}));
    } else {
      ASSERT_SUCCEEDS(slept.controller.sleep(without_weights()));
      ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    }
    slept.engine.load_weights(2);
    const SleepPlan plan = value_of(slept.controller.plan_sleep(preserving(true)));
    ASSERT_EQ(plan.problems.size(), 1u);
    EXPECT_NE(plan.problems[0].find("its KV is of the old ones"), std::string::npos) << plan.problems[0];
    EXPECT_FAILS(slept.controller.sleep(preserving(true)), Code::kFailedPrecondition, "its KV is of the old ones");
    EXPECT_TRUE(slept.controller.is_sleeping());
    slept.engine.load_weights(1);
    ASSERT_SUCCEEDS(slept.controller.wake_up({.old_kv = OldKv::kKeep}));
    ASSERT_SUCCEEDS(slept.controller.sleep(preserving(true)));
    ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    EXPECT_EQ(finish(slept.engine), expected());
  }
}

TEST_P(SleepControllerTest, TheSameWeightsLoadedAgainMaySleepToDiskAtOnce) {
  SleepingEngine slept = make();
  add_example_requests(slept.engine);
  for (int i = 0; i < 6; ++i) slept.engine.step();
  ASSERT_SUCCEEDS(slept.controller.sleep(without_weights()));
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  slept.engine.load_weights(1);
  EXPECT_EQ(value_of(slept.controller.plan_sleep(preserving(true))).problems, std::vector<std::string>{});
  ASSERT_SUCCEEDS(slept.controller.sleep(preserving(true)));
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  EXPECT_EQ(finish(slept.engine), expected());
}

TEST_P(SleepControllerTest, WeightsThatWereNotReloadedAreNotTakenForContentByALaterSleep) {
  SleepingEngine slept = make();
  add_example_requests(slept.engine);
  for (int i = 0; i < 6; ++i) slept.engine.step();
  ASSERT_SUCCEEDS(slept.controller.sleep(without_weights()));
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  EXPECT_EQ(value_of(slept.controller.sleep(preserving(false))).reload, (std::vector<std::string>{"weights"}));
  EXPECT_EQ(value_of(slept.controller.wake_up({})).reload, (std::vector<std::string>{"weights"}));
  EXPECT_FALSE(slept.engine.step());
  slept.engine.load_weights(1);
  EXPECT_TRUE(value_of(slept.controller.wake_up({})).fully_awake);
  EXPECT_EQ(finish(slept.engine), expected());
}

}  // namespace
}  // namespace torpor
