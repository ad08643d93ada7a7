// SPDX-License-Identifier: Apache-2.0
// What sleep and wake mean (docs/semantics.md), with an engine whose tokens depend on every byte.
#include "engine/sleep_controller.h"

#include <thread>

#include <boost/filesystem.hpp>

#include "base/units.h"
#include "tests/engine/sleep_controller_scene.h"
#include "tests/support/disk_reads.h"
#include "tests/support/sanitizers.h"

namespace torpor {
namespace {

using namespace test;

// Under ThreadSanitizer two ranks alone: the others have no thread that these have not.
std::vector<SleepVariant> variants() {
  if (kThreadSanitizer) return {{2, false}};
  return {{1, false}, {1, true}, {2, false}};
}

INSTANTIATE_TEST_SUITE_P(Engines, SleepControllerTest, ::testing::ValuesIn(variants()), [](const auto& info) {
  return std::string(info.param.ranks == 2 ? "TwoRanks" : info.param.defer_copies ? "CopiesLate" : "OneRank");
});

TEST_P(SleepControllerTest, AfterASleepAtAnyStepEveryTokenIsTheSame) {
  for (const bool to_disk : {false, true}) {
    for (int at = 0; at <= kSteps; at += 3 * test::next_case()) {
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

// As after a pull, which has just written it.
TEST_P(SleepControllerTest, AWakeReadsFromTheDiskOnlyWhatIsNotCached) {
  for (const bool cached : {true, false}) {
    SCOPED_TRACE(cached);
    TestEngine::Tokens delivered;
    std::string path;
    {
      SleepingEngine slept = make();
      add_example_requests(slept.engine);
      for (int i = 0; i < 12; ++i) slept.engine.step();
      path = value_of(slept.controller.sleep(preserving(true))).checkpoint;
      delivered = slept.engine.tokens();
    }
    bool direct = false;
    for (const boost::filesystem::directory_entry& file : boost::filesystem::directory_iterator(path)) {
      const auto directory = value_of(linux_file_system().open_directory(path, false));
      const auto opened = value_of(directory->open_file(file.path().filename().string(), FileIo::kFastest));
      direct = opened->io().ends_with("direct");
      ASSERT_TRUE(forget_cached(file.path().string()));
      if (cached) make_cached(file.path().string());
    }
    SleepingEngine woken = make();
    const uint64_t before = read_from_disk();
    ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = path}));
    const uint64_t read = read_from_disk() - before;
    const uint64_t blocks = 10 * kPage;  // there are more of them, each on a page
    EXPECT_EQ(read > blocks, direct && !cached) << read;
    woken.engine.set_tokens(delivered);
    EXPECT_EQ(finish(woken.engine), expected());
  }
}

TEST_P(SleepControllerTest, S9CachedBlocksBeyondTheBudgetLoseTheirHashAndNothingElse) {
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
  EXPECT_EQ(report.saved_bytes, (kWeightBytes + kRuntimeBytes) * static_cast<uint64_t>(GetParam().ranks));  // no KV
  ASSERT_SUCCEEDS(recomputed.controller.wake_up({}));
  EXPECT_EQ(finish(recomputed.engine), expected());
  EXPECT_GT(recomputed.engine.recomputed(), 0);
}

TEST_P(SleepControllerTest, Level2SavesNoWeightsAndSaysWhatToReload) {
  SleepingEngine slept = make();
  add_example_requests(slept.engine);
  slept.engine.step();
  const SleepReport report = value_of(slept.controller.sleep(dropping(2, "recompute")));
  EXPECT_EQ(report.saved_bytes, kRuntimeBytes * static_cast<uint64_t>(GetParam().ranks));
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
  const SleepReport again = value_of(slept.controller.wake_up({.tags = {"weights"}}));
  EXPECT_FALSE(again.changed);
  EXPECT_EQ(again.note, "still asleep: kv_cache");
  EXPECT_EQ(slept.controller.state().tags.at("kv_cache"), "detached");
  EXPECT_FAILS(slept.controller.wake_up({.tags = {"weight"}}), Code::kInvalidArgument, "kv_cache");
  EXPECT_TRUE(value_of(slept.controller.wake_up({.tags = {"kv_cache"}})).fully_awake);
  EXPECT_EQ(finish(slept.engine), expected());
}

// The tags of a GPU: those that a wake need not name come with any that it does.
TEST_P(SleepControllerTest, AWakeOfSomeTagsBringsBackAllThatMayNotWait) {
  SleepingEngine slept = make();
  for (int rank = 0; rank < GetParam().ranks; ++rank) {
    for (const char* tag : {"workspace", "cudagraph"}) {
      const std::vector<uint64_t> sizes = reference::random_sizes(30'000, 3, 1);
      for (const DeviceAddress address :
           value_of(reference::allocate_scattered(slept.engine.memory(rank), tag, sizes, 1)))
        std::memset(reinterpret_cast<void*>(address), 7, 10);  // NOLINT(performance-no-int-to-ptr)
    }
  }
  add_example_requests(slept.engine);
  for (int i = 0; i < 4; ++i) slept.engine.step();
  for (const bool kv_first : {false, true}) {
    ASSERT_SUCCEEDS(slept.controller.sleep(preserving(false)));
    const std::string first = kv_first ? "kv_cache" : "weights";
    const std::string second = kv_first ? "weights" : "kv_cache";
    const SleepReport some = value_of(slept.controller.wake_up({.tags = {first}}));
    EXPECT_EQ(some.note, "still asleep: " + second);
    EXPECT_FALSE(some.fully_awake);
    for (const auto& [tag, state] : slept.controller.state().tags)
      EXPECT_EQ(state, tag == second ? "detached" : "attached") << tag;
    EXPECT_FALSE(slept.engine.step());
    EXPECT_TRUE(value_of(slept.controller.wake_up({.tags = {second}})).fully_awake);
    EXPECT_TRUE(slept.engine.step());
  }
  // One that may not wait can be named, too; a word that names no memory brings none.
  ASSERT_SUCCEEDS(slept.controller.sleep(preserving(false)));
  EXPECT_FALSE(value_of(slept.controller.wake_up({.tags = {"scheduling"}})).changed);
  EXPECT_EQ(slept.controller.state().tags.at("runtime"), "detached");
  EXPECT_EQ(value_of(slept.controller.wake_up({.tags = {"runtime"}})).note, "still asleep: weights, kv_cache");
  EXPECT_EQ(slept.controller.state().tags.at("workspace"), "attached");
  EXPECT_TRUE(value_of(slept.controller.wake_up({})).fully_awake);
  EXPECT_EQ(finish(slept.engine), expected());
}

// What an engine computes with and keeps for no step: no copy of it is made, and nobody is asked to load it.
TEST_P(SleepControllerTest, AWorkspaceIsNotSavedAndComesBackZeroed) {
  SleepingEngine slept = make();
  std::vector<DeviceAddress> workspaces;
  for (int rank = 0; rank < GetParam().ranks; ++rank) {
    workspaces.push_back(value_of(slept.engine.memory(rank).allocate("workspace", "scratch", 1 << 20)));
  }
  const auto first_bytes = [](DeviceAddress address) {
    return reinterpret_cast<unsigned char*>(address);  // NOLINT(performance-no-int-to-ptr)
  };
  add_example_requests(slept.engine);
  for (int i = 0; i < 4; ++i) slept.engine.step();
  for (const bool to_disk : {false, true}) {
    for (const DeviceAddress address : workspaces) std::memset(first_bytes(address), 0xA5, 1 << 20);
    const SleepPlan plan = value_of(slept.controller.plan_sleep(preserving(to_disk)));
    EXPECT_FALSE(plan.save_bytes.contains("workspace"));
    EXPECT_EQ(plan.free_bytes.at("workspace"), workspaces.size() << 20);
    const SleepReport report = value_of(slept.controller.sleep(preserving(to_disk)));
    EXPECT_EQ(report.reload, std::vector<std::string>{});
    EXPECT_EQ(slept.controller.state().tags.at("workspace"), "detached");
    const SleepReport woken = value_of(slept.controller.wake_up({}));
    EXPECT_TRUE(woken.fully_awake);
    EXPECT_EQ(woken.reload, std::vector<std::string>{});
    for (const DeviceAddress address : workspaces) EXPECT_EQ(first_bytes(address)[4096], 0);
  }
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
  const auto sum = [](const std::map<std::string, uint64_t>& of) {
    return of.at("weights") + of.at("kv_cache") + of.at("runtime");
  };
  EXPECT_EQ(sum(plan.save_bytes), report.saved_bytes);
  EXPECT_EQ(sum(plan.free_bytes), report.freed_bytes);
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  EXPECT_EQ(finish(slept.engine), expected());
}

// A plan lists what a sleep to disk refuses before it begins.
TEST_P(SleepControllerTest, APlanNamesWhatTheSleepWouldRefuse) {
  const auto refused = [](SleepingEngine& slept, const SleepOptions& options, const char* words) {
    const SleepPlan plan = value_of(slept.controller.plan_sleep(options));
    ASSERT_EQ(plan.problems.size(), 1u) << words;
    EXPECT_NE(plan.problems[0].find(words), std::string::npos) << plan.problems[0];
    const Result<SleepReport> report = slept.controller.sleep(options);
    ASSERT_FALSE(report);
    EXPECT_NE(report.error().what.find(words), std::string::npos) << report.error().to_string();
  };
  SleepingEngine slept = make();
  add_example_requests(slept.engine);
  slept.engine.step();
  SleepOptions weights_alone = preserving(true);
  weights_alone.tags = {"weights"};
  refused(slept, weights_alone, "needs their KV");
  SleepOptions kv_alone = preserving(false);
  kv_alone.tags = {"kv_cache"};
  ASSERT_SUCCEEDS(slept.controller.sleep(kv_alone));
  refused(slept, preserving(true), "asleep already");
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  ASSERT_SUCCEEDS(slept.controller.sleep({.preserve_state = true, .weights = Weights::kReload}));
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  refused(slept, preserving(true), "without content");
}

TEST_P(SleepControllerTest, OnlyOneOperationAtATimeAndStateCanAlwaysBeAsked) {
  SleepingEngine slept = make();
  add_example_requests(slept.engine);
  std::vector<std::string> seen;
  slept.engine.before_hook = [&](const std::string& hook) {
    if (hook != "capture" && hook != "rank restore") return;
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

}  // namespace
}  // namespace torpor
