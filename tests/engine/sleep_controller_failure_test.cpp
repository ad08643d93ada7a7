// When something fails (docs/semantics.md, "When something fails"): one test for each row, and faults everywhere.
#include <fstream>

#include "engine/sleep_controller.h"
#include "tests/support/results.h"
#include "tests/support/sanitizers.h"
#include "tests/support/sleeping_engine.h"

namespace torpor {
namespace {

using namespace test;

class SleepFailure : public ::testing::Test {
 protected:
  SleepingEngine make(TestEngineOptions options = {}) {
    return SleepingEngine(file_system_, temporary_.path(), options);
  }
  static void begin(TestEngine& engine, int steps = 6) {
    add_example_requests(engine);
    for (int i = 0; i < steps; ++i) engine.step();
  }
  static constexpr uint64_t kRoomForWeightsOnly = 204'800;  // and not a page more
  static constexpr SleepOptions to_host() { return {.preserve_state = true}; }
  static constexpr SleepOptions to_disk() { return {.preserve_state = true, .to_disk = true}; }
  // It serves on as if nothing had been asked.
  static void expect_untouched(SleepingEngine& slept) {
    EXPECT_FALSE(slept.controller.is_sleeping());
    EXPECT_FALSE(slept.engine.frozen());
    EXPECT_EQ(finish(slept.engine), uninterrupted());
    EXPECT_EQ(slept.engine.recomputed(), 0);
  }
  std::string written_checkpoint(TestEngineOptions options = {}) {
    SleepingEngine slept = make(options);
    begin(slept.engine);
    return value_of(slept.controller.sleep(to_disk())).checkpoint;
  }
  test::TemporaryDirectory temporary_;
  FaultyFileSystem file_system_;
};

TEST_F(SleepFailure, AlreadyAsleepOrAwakeIsANoOp) {
  SleepingEngine slept = make();
  begin(slept.engine);
  const SleepReport awake = value_of(slept.controller.wake_up({}));
  EXPECT_FALSE(awake.changed);
  EXPECT_TRUE(awake.fully_awake);
  ASSERT_SUCCEEDS(slept.controller.sleep(to_host()));
  const SleepReport again = value_of(slept.controller.sleep(to_disk()));
  EXPECT_FALSE(again.changed);
  EXPECT_EQ(again.level, 1);
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  expect_untouched(slept);
}

// --- one of several engines: it sleeps once the others can ---------------------------------------------------------

TEST_F(SleepFailure, AHeldSleepHasKeptAllAndFreedNothing) {
  for (const bool disk : {false, true}) {
    SleepingEngine slept = make();
    begin(slept.engine);
    SleepOptions options = disk ? to_disk() : to_host();
    options.data_parallel = {.rank = 1, .size = 2};
    const SleepReport held = value_of(slept.controller.sleep(options));
    EXPECT_TRUE(held.held);
    EXPECT_FALSE(held.changed);
    EXPECT_EQ(held.checkpoint, disk ? temporary_ / "rank-1-of-2/g-000001" : "");
    EXPECT_TRUE(slept.engine.frozen());
    const std::vector<RankLedger> ledgers = value_of(slept.controller.ledgers());
    for (const auto& [tag, entry] : ledgers.front().tags) EXPECT_GT(entry.physical_bytes, 0u) << tag;
    EXPECT_FAILS(slept.controller.sleep(options), Code::kFailedPrecondition, "front end");
    EXPECT_FAILS(slept.controller.checkpoint({}), Code::kFailedPrecondition, "front end");
    EXPECT_FAILS(slept.controller.wake_up({}), Code::kFailedPrecondition, "front end");
    const SleepReport asleep = value_of(slept.controller.end_sleep(true));
    EXPECT_TRUE(asleep.changed);
    EXPECT_FALSE(asleep.held);
    EXPECT_GT(asleep.freed_bytes, 0u);
    EXPECT_EQ(asleep.checkpoint, held.checkpoint);
    EXPECT_FAILS(slept.controller.end_sleep(true), Code::kFailedPrecondition, "no sleep is held");
    ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    expect_untouched(slept);
  }
}

TEST_F(SleepFailure, AHeldSleepThatIsTakenBackLeavesNoTrace) {
  for (const bool disk : {false, true}) {
    SleepingEngine slept = make();
    begin(slept.engine);
    SleepOptions options = disk ? to_disk() : to_host();
    options.data_parallel = {.rank = 1, .size = 2};
    const std::string path = value_of(slept.controller.sleep(options)).checkpoint;
    EXPECT_TRUE(value_of(slept.controller.end_sleep(false)).fully_awake);
    if (disk) {
      EXPECT_FAILS(open_checkpoint(file_system_, path), Code::kNotFound);
    }
    expect_untouched(slept);
  }
}

TEST_F(SleepFailure, AHeldSleepWithoutItsRequestsHasNotEndedThem) {
  SleepingEngine slept = make();
  begin(slept.engine);
  EXPECT_TRUE(value_of(slept.controller.sleep({.level = 2, .in_flight = "abort", .data_parallel = {.size = 2}})).held);
  ASSERT_SUCCEEDS(slept.controller.end_sleep(false));
  expect_untouched(slept);
}

TEST_F(SleepFailure, AHeldCheckpointIsKeptOrTakenBack) {
  SleepingEngine slept = make();
  begin(slept.engine);
  const std::string first = value_of(slept.controller.checkpoint({}, {.size = 2})).checkpoint;
  EXPECT_TRUE(slept.engine.frozen());
  const SleepReport written = value_of(slept.controller.end_sleep(true));
  EXPECT_TRUE(written.fully_awake && written.changed);
  EXPECT_EQ(written.checkpoint, first);
  const std::string second = value_of(slept.controller.checkpoint({}, {.size = 2})).checkpoint;
  ASSERT_SUCCEEDS(slept.controller.end_sleep(false));
  EXPECT_SUCCEEDS(open_checkpoint(file_system_, first));
  EXPECT_FAILS(open_checkpoint(file_system_, second), Code::kNotFound);
  expect_untouched(slept);
}

TEST_F(SleepFailure, AHeldSleepIsUndoneWithItsController) {
  SleepingEngine slept = make();
  begin(slept.engine);
  {
    SleepController other(slept.engine, file_system_, system_clock(), {.directory = temporary_.path()});
    ASSERT_SUCCEEDS(other.sleep({.preserve_state = true, .to_disk = true, .data_parallel = {.size = 2}}));
  }
  EXPECT_FAILS(open_checkpoint(file_system_, temporary_ / "rank-0-of-2"), Code::kNotFound);
  expect_untouched(slept);
}

TEST_F(SleepFailure, WrongArgumentsAreRefusedByName) {
  SleepingEngine slept = make();
  begin(slept.engine);
  const auto with = [](auto change) {
    SleepOptions options = to_host();
    change(options);
    return options;
  };
  EXPECT_FAILS(slept.controller.sleep(with([](auto& o) { o.level = 3; })), Code::kInvalidArgument, "level is 3");
  EXPECT_FAILS(slept.controller.sleep(with([](auto& o) { o.level = -1; })), Code::kInvalidArgument, "level");
  EXPECT_FAILS(slept.controller.sleep(with([](auto& o) { o.tags = {"wieghts"}; })), Code::kInvalidArgument, "wieghts");
  EXPECT_FAILS(slept.controller.sleep(with([](auto& o) { o.in_flight = "explode"; })), Code::kInvalidArgument,
               "explode");
  EXPECT_FAILS(slept.controller.sleep(with([](auto& o) { o.in_flight = "abort"; })), Code::kInvalidArgument,
               "preserve_state");
  EXPECT_FAILS(slept.controller.sleep(with([](auto& o) { o.timeout_seconds = -1; })), Code::kInvalidArgument,
               "timeout");
  EXPECT_FAILS(slept.controller.sleep(with([](auto& o) { o.to_disk = true, o.tags = {"weights"}; })),
               Code::kInvalidArgument, "kv_cache");
  EXPECT_FAILS(slept.controller.sleep({.level = 0, .to_disk = true}), Code::kInvalidArgument, "level 0");
  SleepingEngine without_directory(file_system_, "");
  EXPECT_FAILS(without_directory.controller.sleep(to_disk()), Code::kInvalidArgument, "directory");
  ASSERT_SUCCEEDS(slept.controller.sleep(to_host()));
  EXPECT_FAILS(slept.controller.wake_up({.tags = {"wieghts"}}), Code::kInvalidArgument, "wieghts");
  EXPECT_FAILS(slept.controller.wake_up({.from_checkpoint = temporary_.path()}), Code::kFailedPrecondition, "asleep");
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  expect_untouched(slept);
}

TEST_F(SleepFailure, AFeatureThatCannotBePreservedIsRefusedByNameBeforeAnythingIsTouched) {
  SleepingEngine slept = make();
  begin(slept.engine);
  slept.engine.unsupported_features = {"LoRA", "speculative decoding"};
  slept.engine.before_hook = [](const std::string& hook) {
    EXPECT_TRUE(hook == "unsupported" || hook == "rank describe") << hook;
  };
  EXPECT_FAILS(slept.controller.sleep(to_host()), Code::kUnsupported, "LoRA; speculative decoding");
  slept.engine.before_hook = nullptr;
  expect_untouched(slept);
}

TEST_F(SleepFailure, AnEngineWithAFeatureThatCannotBePreservedDoesNotGoOnWithWhatAnotherOneWasGiven) {
  std::string path;
  {
    SleepingEngine slept = make();
    begin(slept.engine);
    path = value_of(slept.controller.sleep(to_disk())).checkpoint;
  }
  SleepingEngine woken = make();
  woken.engine.unsupported_features = {"LoRA"};
  woken.engine.before_hook = [](const std::string& hook) {
    EXPECT_TRUE(hook == "unsupported" || hook == "unfinished_requests") << hook;
  };
  EXPECT_FAILS(woken.controller.wake_up({.from_checkpoint = path}), Code::kUnsupported, "LoRA");
  EXPECT_FAILS(woken.controller.wake_up({.answers = std::vector<Answer>{}}), Code::kUnsupported, "LoRA");
  woken.engine.before_hook = nullptr;
  woken.engine.unsupported_features.clear();
  EXPECT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = path}));
}

TEST_F(SleepFailure, I7WhereverAHookFailsTheEngineStaysAwakeWithNothingLost) {
  for (const char* hook : {"unsupported", "quiesce", "capture", "fingerprint", "release_derived", "rank describe",
                           "rank save", "rank detach", "rank moved"}) {
    SCOPED_TRACE(hook);
    SleepingEngine slept = make();
    begin(slept.engine);
    slept.engine.fail_hook(hook);
    const Result<SleepReport> report = slept.controller.sleep(to_disk());
    EXPECT_FAILS(report, Code::kInternal, hook);
    EXPECT_FALSE(report.error().state_changed);
    EXPECT_FAILS(open_checkpoint(linux_file_system(), temporary_.path()), Code::kNotFound);  // none is left behind
    expect_untouched(slept);
  }
}

TEST_F(SleepFailure, I7WhereverAWakeFailsItStaysAsleepAndARetryWorks) {
  for (const bool disk : {false, true}) {
    for (const char* hook : {"rank attach", "rank restore", "rebuild_derived", "reconnect", "rank finish"}) {
      SCOPED_TRACE(testing::Message() << hook << (disk ? " to disk" : " to host"));
      SleepingEngine slept = make();
      begin(slept.engine);
      ASSERT_SUCCEEDS(slept.controller.sleep(disk ? to_disk() : to_host()));
      slept.engine.fail_hook(hook);
      const Result<SleepReport> woken = slept.controller.wake_up({});
      EXPECT_FAILS(woken, Code::kInternal, hook);
      EXPECT_FALSE(woken.error().state_changed);
      EXPECT_TRUE(slept.controller.is_sleeping());
      EXPECT_EQ(slept.engine.device().info().physical_bytes, 0u);
      ASSERT_SUCCEEDS(slept.controller.wake_up({}));
      expect_untouched(slept);
    }
  }
}

// The device fails at each of its calls, once: the sleep either happens, or did not happen; if what failed cannot be
// undone the engine says that it is lost.
TEST_F(SleepFailure, I7WhereverTheDeviceFailsASleepIsAllOrNothing) {
  for (const int ranks : {1, 2}) {
    const TestEngineOptions options{.ranks = ranks};
    const TestEngine::Tokens expected = uninterrupted(options);
    int undone = 0;
    int lost = 0;
    for (uint64_t n = 1;; ++n) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, call " << n);
      SleepingEngine slept = make(options);
      begin(slept.engine);
      slept.engine.device(ranks - 1).fail_at(n);
      const Result<SleepReport> report = slept.controller.sleep(to_host());
      const bool fired = slept.engine.device(ranks - 1).fired();
      slept.engine.device(ranks - 1).fail_at(0);
      if (!report && slept.controller.state().engine == "lost") {
        EXPECT_TRUE(report.error().state_changed);
        EXPECT_FAILS(slept.controller.wake_up({}), Code::kFailedPrecondition, "lost");
        EXPECT_FAILS(slept.controller.sleep(to_host()), Code::kFailedPrecondition, "lost");
        ++lost;
        continue;
      }
      if (report) {
        ASSERT_SUCCEEDS(slept.controller.wake_up({}));
      } else {
        EXPECT_FALSE(report.error().state_changed);
        ++undone;
      }
      EXPECT_FALSE(slept.engine.frozen());
      EXPECT_EQ(finish(slept.engine), expected);
      if (!fired) break;
    }
    EXPECT_GE(undone, 3);  // a failed copy of several chunks is mended by trying each again
    EXPECT_EQ(lost, 2);    // the two releases: memory that the device will not give up
  }
}

TEST_F(SleepFailure, I7WhereverTheDeviceFailsAWakeStaysAsleepAndARetryWorks) {
  for (const int ranks : {1, 2}) {
    const TestEngineOptions options{.ranks = ranks};
    const TestEngine::Tokens expected = uninterrupted(options);
    for (uint64_t n = 1;; ++n) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, call " << n);
      SleepingEngine slept = make(options);
      begin(slept.engine);
      ASSERT_SUCCEEDS(slept.controller.sleep(to_host()));
      slept.engine.device(ranks - 1).fail_at(n);
      const Result<SleepReport> woken = slept.controller.wake_up({});
      const bool fired = slept.engine.device(ranks - 1).fired();
      slept.engine.device(ranks - 1).fail_at(0);
      if (!woken) {
        EXPECT_FALSE(woken.error().state_changed);
        EXPECT_TRUE(slept.controller.is_sleeping());
        ASSERT_SUCCEEDS(slept.controller.wake_up({}));
      }
      EXPECT_EQ(finish(slept.engine), expected);
      if (!fired) break;
    }
  }
}

TEST_F(SleepFailure, I7WhereverAFileOperationFailsASleepToDiskIsAllOrNothing) {
  const TestEngine::Tokens expected = uninterrupted();
  for (const int native : {EIO, ENOSPC}) {
    for (uint64_t n = 1;; n += test::kNextFailure) {
      SCOPED_TRACE(testing::Message() << "call " << n << ", errno " << native);
      SleepingEngine slept = make();
      begin(slept.engine);
      file_system_.plan.set(Fault::kError, n, native);
      const Result<SleepReport> report = slept.controller.sleep(to_disk());
      const bool fired = file_system_.plan.fired();
      file_system_.plan.clear();
      if (report) {
        ASSERT_SUCCEEDS(slept.controller.wake_up({}));
      } else {
        EXPECT_FALSE(report.error().state_changed);
      }
      EXPECT_FALSE(slept.engine.frozen());
      EXPECT_EQ(finish(slept.engine), expected);
      if (!fired) break;
      ASSERT_LT(n, 300u);
    }
  }
}

TEST_F(SleepFailure, I7WhereverAFileOperationFailsAWakeFromDiskStaysAsleepAndARetryWorks) {
  const TestEngine::Tokens expected = uninterrupted();
  for (uint64_t n = 1;; n += test::kNextFailure) {
    SCOPED_TRACE(n);
    SleepingEngine slept = make();
    begin(slept.engine);
    ASSERT_SUCCEEDS(slept.controller.sleep(to_disk()));
    file_system_.plan.set(Fault::kError, n);
    const Result<SleepReport> woken = slept.controller.wake_up({});
    const bool fired = file_system_.plan.fired();
    file_system_.plan.clear();
    if (!woken) {
      EXPECT_TRUE(slept.controller.is_sleeping());
      ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    }
    EXPECT_EQ(finish(slept.engine), expected);
    if (!fired) break;
    ASSERT_LT(n, 300u);
  }
}

TEST_F(SleepFailure, I7WhereverADeeperSleepFailsTheEngineStaysAsAsleepAsItWas) {
  struct Case {
    const char* name;
    SleepOptions first;
    std::vector<const char*> hooks;
  };
  const std::vector<Case> cases = {
      {"paused",
       {.level = 0},
       {"unsupported", "capture", "rank describe", "rank save", "release_derived", "rank detach"}},
      {"KV asleep", {.preserve_state = true, .tags = {"kv_cache"}}, {"rank describe", "rank save", "rank detach"}},
      {"weights asleep", {.preserve_state = true, .tags = {"weights"}}, {"capture", "rank save", "rank detach"}},
  };
  for (const Case& with : cases) {
    for (const char* hook : with.hooks) {
      SCOPED_TRACE(testing::Message() << with.name << ", " << hook);
      SleepingEngine slept = make();
      begin(slept.engine);
      ASSERT_SUCCEEDS(slept.controller.sleep(with.first));
      ASSERT_SUCCEEDS(slept.controller.ledgers());
      const ControllerState before = slept.controller.state();
      slept.engine.fail_hook(hook);
      const Result<SleepReport> report = slept.controller.sleep(to_host());
      EXPECT_FAILS(report, Code::kInternal, hook);
      EXPECT_FALSE(report.error().state_changed);
      ASSERT_SUCCEEDS(slept.controller.ledgers());
      EXPECT_EQ(slept.controller.state().engine, "asleep");
      EXPECT_EQ(slept.controller.state().tags, before.tags);
      EXPECT_EQ(slept.controller.state().level, before.level);
      EXPECT_FALSE(slept.engine.step());
      EXPECT_TRUE(value_of(slept.controller.sleep(to_host())).changed);
      ASSERT_SUCCEEDS(slept.controller.wake_up({}));
      expect_untouched(slept);
    }
  }
}

TEST_F(SleepFailure, MemoryThatSleepsAlreadyCannotGoToDisk) {
  SleepingEngine slept = make();
  begin(slept.engine);
  ASSERT_SUCCEEDS(slept.controller.sleep({.preserve_state = true, .tags = {"weights"}}));
  EXPECT_FAILS(slept.controller.sleep(to_disk()), Code::kFailedPrecondition, "weights");
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  expect_untouched(slept);
}

TEST_F(SleepFailure, NoCheckpointIsMadeOfWeightsThatWereNeverLoaded) {
  for (const bool serving : {false, true}) {
    SleepingEngine slept = make();
    begin(slept.engine);
    if (serving) {
      ASSERT_SUCCEEDS(slept.controller.sleep({.level = 2, .in_flight = "recompute"}));
    } else {
      ASSERT_SUCCEEDS(slept.controller.sleep({.level = 2, .preserve_state = true}));
    }
    ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    EXPECT_FAILS(slept.controller.sleep(to_disk()), Code::kFailedPrecondition, "not loaded");
    slept.engine.load_weights(1);
    EXPECT_TRUE(value_of(slept.controller.sleep(to_disk())).changed);
    ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    EXPECT_EQ(finish(slept.engine), uninterrupted());
  }
}

TEST_F(SleepFailure, IfOldPrefixesCannotBeForgottenTheWakeFailsAndARetryWorks) {
  SleepingEngine slept = make();
  begin(slept.engine);
  ASSERT_SUCCEEDS(slept.controller.sleep({.level = 2, .preserve_state = true}));
  ASSERT_SUCCEEDS(slept.controller.wake_up({.tags = {"weights"}}));
  slept.engine.load_weights(1);
  slept.engine.fail_hook("retire_prefix");
  EXPECT_FAILS(slept.controller.wake_up({}), Code::kInternal, "retire_prefix");
  EXPECT_TRUE(slept.controller.is_sleeping());
  bool retired = false;
  slept.engine.before_hook = [&](const std::string& hook) { retired |= hook == "retire_prefix"; };
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  EXPECT_TRUE(retired);
  slept.engine.before_hook = nullptr;
  expect_untouched(slept);
}

// on_save_error="discard": what cannot go to disk is kept in host memory; only what has no room there either is
// dropped.
TEST_F(SleepFailure, OnRequestWhateverFailsOfACheckpointTheRequestsAreKeptInHostMemory) {
  const TestEngine::Tokens expected = uninterrupted();
  SleepOptions options = to_disk();
  options.discard_on_save_error = true;
  int kept_in_host = 0;
  for (const bool sticky : {false, true}) {
    for (uint64_t n = 1;; n += sticky ? 17 : 5) {
      SCOPED_TRACE(testing::Message() << "call " << n << (sticky ? " and all after" : ""));
      test::TemporaryDirectory directory;
      SleepingEngine slept(file_system_, directory.path());
      begin(slept.engine);
      file_system_.plan.set(Fault::kError, n, ENOSPC, sticky);
      const Result<SleepReport> report = slept.controller.sleep(options);
      const bool fired = file_system_.plan.fired();
      file_system_.plan.clear();
      ASSERT_SUCCEEDS(report);
      EXPECT_TRUE(report->changed && report->preserve_state);
      if (report->to == "host") {
        ++kept_in_host;
        EXPECT_NE(report->note.find("host memory"), std::string::npos) << report->note;
        EXPECT_EQ(report->checkpoint, "");
        EXPECT_TRUE(report->checkpoint_parts.empty());
      } else {
        EXPECT_EQ(report->note, "");
        EXPECT_NE(report->checkpoint, "");
      }
      for (const RankLedger& ledger : report->ledgers) EXPECT_EQ(ledger.device_physical_bytes, 0U);
      ASSERT_SUCCEEDS(slept.controller.wake_up({}));
      EXPECT_EQ(finish(slept.engine), expected);
      EXPECT_EQ(slept.engine.recomputed(), 0);
      if (!fired) break;
      ASSERT_LT(n, 300U);
    }
  }
  EXPECT_GT(kept_in_host, 10);
}

TEST_F(SleepFailure, OnRequestWhateverHookFailsTheRequestsAreKeptInHostMemory) {
  for (const char* hook : {"capture", "fingerprint", "rank save", "rank moved", "rank digest"}) {
    SCOPED_TRACE(hook);
    SleepingEngine slept = make();
    begin(slept.engine);
    slept.engine.fail_hook(hook);
    SleepOptions options = to_disk();
    options.discard_on_save_error = true;
    if (hook == std::string("rank digest")) options.tags = {"kv_cache"};  // weights that are saved are not read for it
    const SleepReport report = value_of(slept.controller.sleep(options));
    EXPECT_TRUE(report.preserve_state);
    EXPECT_EQ(report.to, "host");
    EXPECT_NE(report.note.find(hook), std::string::npos) << report.note;
    EXPECT_FAILS(open_checkpoint(linux_file_system(), temporary_.path()), Code::kNotFound);  // none is left behind
    ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    expect_untouched(slept);
  }
}

TEST_F(SleepFailure, OnRequestOnlyRequestsThatFitNowhereAreDropped) {
  for (const bool disk : {false, true}) {
    SCOPED_TRACE(disk);
    SleepingEngine slept = make({.arena_budget_bytes = kRoomForWeightsOnly});
    begin(slept.engine);
    SleepOptions options = disk ? to_disk() : to_host();
    options.discard_on_save_error = true;
    const SleepReport report = value_of(slept.controller.sleep(options));
    EXPECT_TRUE(report.changed);
    EXPECT_FALSE(report.preserve_state);
    EXPECT_EQ(report.to, "host");
    EXPECT_NE(report.note.find("arena_budget_bytes"), std::string::npos) << report.note;
    EXPECT_EQ(report.note.find("not on disk") != std::string::npos, disk) << report.note;
    EXPECT_EQ(report.kept_blocks, 0);
    ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    EXPECT_EQ(value_of(slept.engine.unfinished_requests()), 0);
    add_late_request(slept.engine);
    slept.engine.run();
    EXPECT_EQ(slept.engine.tokens().at("late"), uninterrupted().at("late"));  // the weights are right
  }
}

TEST_F(SleepFailure, IfNotEvenTheWeightsFitNothingIsDropped) {
  SleepingEngine slept = make({.arena_budget_bytes = 100'000});
  begin(slept.engine);
  SleepOptions options = to_host();
  options.discard_on_save_error = true;
  const Result<SleepReport> report = slept.controller.sleep(options);
  EXPECT_FAILS(report, Code::kResourceExhausted, "arena_budget_bytes");
  EXPECT_FALSE(report.error().state_changed);
  expect_untouched(slept);
}

TEST_F(SleepFailure, OnRequestASleepGoesOnWithoutTheStateThatCouldNotBeSaved) {
  SleepingEngine slept = make();
  begin(slept.engine);
  slept.engine.fail_hook("capture", /*always=*/true);
  SleepOptions options = to_disk();
  options.discard_on_save_error = true;
  const SleepReport report = value_of(slept.controller.sleep(options));
  EXPECT_TRUE(report.changed);
  EXPECT_FALSE(report.preserve_state);
  EXPECT_NE(report.note.find("discarded"), std::string::npos);
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  EXPECT_EQ(value_of(slept.engine.unfinished_requests()), 0);
  add_late_request(slept.engine);
  slept.engine.run();
  EXPECT_EQ(slept.engine.tokens().at("late"), uninterrupted().at("late"));  // the weights are right
}

TEST_F(SleepFailure, TheHostBudgetIsNotExceededAndTheEngineStaysAwake) {
  SleepingEngine slept = make({.arena_budget_bytes = 100'000});
  begin(slept.engine);
  EXPECT_FAILS(slept.controller.sleep(to_host()), Code::kResourceExhausted, "arena_budget_bytes");
  expect_untouched(slept);
}

TEST_F(SleepFailure, WithoutDeviceMemoryAWakeStaysAsleepUntilThereIsSome) {
  SleepingEngine slept = make({.device_capacity_bytes = 1 * kMiB});
  begin(slept.engine);
  ASSERT_SUCCEEDS(slept.controller.sleep(to_host()));
  const PhysicalId other = value_of(slept.engine.device().create(1 * kMiB));
  EXPECT_FAILS(slept.controller.wake_up({}), Code::kResourceExhausted, "needed");
  EXPECT_TRUE(slept.controller.is_sleeping());
  ASSERT_SUCCEEDS(slept.engine.device().release(other));
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  expect_untouched(slept);
}

TEST_F(SleepFailure, ACheckpointOfAnotherEngineIsRefusedFieldByField) {
  const std::string path = written_checkpoint();
  SleepingEngine other = make({.num_blocks = 32, .weights_seed = 9});
  const Result<SleepReport> woken = other.controller.wake_up({.from_checkpoint = path});
  EXPECT_FAILS(woken, Code::kIncompatible, "blocks: checkpoint has 64, this engine has 32");
  EXPECT_FAILS(woken, Code::kIncompatible, "weights_digest_rank0");
  EXPECT_FALSE(other.controller.is_sleeping());
  other.engine.add("x", {1}, 3);
  other.engine.run();
  EXPECT_EQ(other.engine.tokens().at("x").size(), 3u);  // it serves

  SleepingEngine more_ranks = make({.ranks = 2});
  EXPECT_FAILS(more_ranks.controller.wake_up({.from_checkpoint = path}), Code::kIncompatible, "ranks");
}

TEST_F(SleepFailure, ADamagedCheckpointIsRefusedAndOnRequestWokenWithoutItsState) {
  const std::string path = written_checkpoint();
  {
    const Checkpoint checkpoint = value_of(open_checkpoint(linux_file_system(), path));
    const auto& chunks = checkpoint.manifest().ranks[0].chunks;
    const auto block = std::find_if(chunks.begin(), chunks.end(),
                                    [](const SavedChunk& chunk) { return chunk.key.kind == ChunkKind::kKvBlock; });
    std::fstream file(path + "/chunks-r0", std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(block->offset) + 10);
    const char byte = static_cast<char>(file.get() ^ 1);
    file.seekp(static_cast<std::streamoff>(block->offset) + 10);
    file.put(byte);
  }
  SleepingEngine woken = make();
  EXPECT_FAILS(woken.controller.wake_up({.from_checkpoint = path}), Code::kCorruption, "kv_cache block");
  EXPECT_FALSE(woken.controller.is_sleeping());
  const SleepReport report =
      value_of(woken.controller.wake_up({.from_checkpoint = path, .discard_on_restore_error = true}));
  EXPECT_NE(report.note.find("discarded"), std::string::npos);
  begin(woken.engine);
  expect_untouched(woken);
}

TEST_F(SleepFailure, NoCheckpointIsNotFound) {
  SleepingEngine woken = make();
  EXPECT_FAILS(woken.controller.wake_up({.from_checkpoint = temporary_.path()}), Code::kNotFound);
  EXPECT_FALSE(woken.controller.is_sleeping());
}

TEST_F(SleepFailure, AnEngineWithRequestsTakesNoCheckpoint) {
  const std::string path = written_checkpoint();
  SleepingEngine busy = make();
  begin(busy.engine);
  EXPECT_FAILS(busy.controller.wake_up({.from_checkpoint = path}), Code::kFailedPrecondition, "requests of its own");
  expect_untouched(busy);
}

TEST_F(SleepFailure, I7WhereverARestoreFailsTheNewEngineStaysEmptyAndUsable) {
  const std::string path = written_checkpoint();
  for (const char* hook : {"quiesce", "fingerprint", "drop_requests", "rank load_blocks", "restore", "resume"}) {
    SCOPED_TRACE(hook);
    SleepingEngine woken = make();
    woken.engine.fail_hook(hook);
    EXPECT_FAILS(woken.controller.wake_up({.from_checkpoint = path}), Code::kInternal, hook);
    EXPECT_FALSE(woken.controller.is_sleeping());
    EXPECT_EQ(value_of(woken.engine.unfinished_requests()), 0);
    ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = path}));
    EXPECT_EQ(value_of(woken.engine.unfinished_requests()), 3);
  }
}

TEST_F(SleepFailure, ARequestThatCannotBeRestoredFailsAlone) {
  const std::string path = written_checkpoint();
  SleepingEngine woken = make();
  woken.engine.invalid_request = "a";
  const SleepReport report = value_of(woken.controller.wake_up({.from_checkpoint = path}));
  ASSERT_EQ(report.failed_requests.size(), 1u);
  EXPECT_EQ(report.failed_requests[0].id, "a");
  EXPECT_EQ(report.requests, 2);
  woken.engine.run();
  const auto expected = uninterrupted();
  const auto& c = expected.at("c");
  EXPECT_EQ(woken.engine.tokens().at("c"), std::vector<int32_t>(c.begin() + 6, c.end()));
  EXPECT_FALSE(woken.engine.tokens().contains("a"));
}

TEST_F(SleepFailure, WhatTheFrontEndCannotTakeIsThrownAway) {
  const std::string path = written_checkpoint();
  SleepingEngine woken = make();
  ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = path, .hold = true}));
  EXPECT_FALSE(woken.engine.step());
  EXPECT_FAILS(woken.controller.sleep(to_host()), Code::kFailedPrecondition, "front end");
  ASSERT_SUCCEEDS(woken.controller.end_hold(false));
  EXPECT_FALSE(woken.controller.is_sleeping());
  EXPECT_EQ(value_of(woken.engine.unfinished_requests()), 0);
  EXPECT_FAILS(woken.controller.end_hold(true), Code::kFailedPrecondition);
  begin(woken.engine);
  expect_untouched(woken);
}

// What was restored is in the engine and cannot be taken out again: whatever the caller allowed, it is not awake.
TEST_F(SleepFailure, WhatCannotBeTakenOutAgainLosesTheEngine) {
  const std::string path = written_checkpoint();
  for (const bool discard : {false, true}) {
    SCOPED_TRACE(discard);
    SleepingEngine woken = make();
    woken.engine.fail_hook("restore");
    woken.engine.before_hook = [&](const std::string& hook) {
      if (hook == "forget_restored") woken.engine.fail_hook(hook);
    };
    const Result<SleepReport> report =
        woken.controller.wake_up({.from_checkpoint = path, .discard_on_restore_error = discard});
    EXPECT_FAILS(report, Code::kInternal, "restore");
    EXPECT_TRUE(report.error().state_changed);
    EXPECT_EQ(woken.controller.state().engine, "lost");
  }
}

TEST_F(SleepFailure, AHoldThatCannotBeEndedLosesTheEngine) {
  const std::string path = written_checkpoint();
  for (const bool keep : {false, true}) {
    SCOPED_TRACE(keep);
    SleepingEngine woken = make();
    ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = path, .hold = true}));
    woken.engine.fail_hook(keep ? "resume" : "forget_restored");
    EXPECT_FAILS(woken.controller.end_hold(keep), Code::kInternal);
    EXPECT_EQ(woken.controller.state().engine, "lost");
  }
}

// Whatever is thrown is an error, and what was done until then is undone; tests/proof/engine_faults_test.cpp has all.
TEST_F(SleepFailure, I7WhateverAHookThrowsIsAnErrorAndUndone) {
  for (const char* hook : {"unsupported", "quiesce", "capture", "rank save", "release_derived", "rank detach"}) {
    SCOPED_TRACE(hook);
    SleepingEngine slept = make();
    begin(slept.engine);
    slept.engine.before_hook = [&](const std::string& entered) {
      if (entered == hook) throw std::runtime_error("thrown by a hook");
    };
    EXPECT_FAILS(slept.controller.sleep(to_host()), Code::kInternal, "thrown by a hook");
    slept.engine.before_hook = nullptr;
    EXPECT_EQ(slept.controller.state().engine, "awake");
    ASSERT_SUCCEEDS(slept.controller.sleep(to_host()));
    ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    expect_untouched(slept);
  }
}

TEST_F(SleepFailure, NothingThatFailsAfterTheEngineRunsAgainLeavesItRecordedAsAsleep) {
  SleepingEngine slept = make();
  begin(slept.engine);
  ASSERT_SUCCEEDS(slept.controller.sleep(to_host()));
  slept.engine.before_hook = [&](const std::string& hook) {
    if (hook == "resume") slept.engine.fail_hook("unfinished_requests", true);
  };
  const Result<SleepReport> woken = slept.controller.wake_up({});
  EXPECT_EQ(slept.controller.is_sleeping(), slept.engine.frozen());
  slept.engine.before_hook = nullptr;
  slept.engine.fail_hook("");
  ASSERT_SUCCEEDS(woken);
  expect_untouched(slept);
}

TEST_F(SleepFailure, RequestsThatWereEndedBeforeTheFailureAreAChange) {
  for (const char* in_flight : {"abort", "recompute"}) {
    SCOPED_TRACE(in_flight);
    SleepingEngine slept = make();
    begin(slept.engine);
    slept.engine.fail_hook("rank detach");
    const Result<SleepReport> report = slept.controller.sleep({.in_flight = in_flight});
    EXPECT_FAILS(report, Code::kInternal, in_flight == std::string("abort") ? "requests were ended" : "computed again");
    EXPECT_TRUE(report.error().state_changed);
    EXPECT_EQ(slept.controller.state().engine, "awake");
    // Nothing was dropped yet when what comes before fails.
    SleepingEngine early = make();
    begin(early.engine);
    early.engine.fail_hook("release_derived");
    const Result<SleepReport> undone = early.controller.sleep({.in_flight = in_flight});
    EXPECT_FAILS(undone, Code::kInternal, "release_derived");
    EXPECT_FALSE(undone.error().state_changed);
    expect_untouched(early);
  }
}

TEST_F(SleepFailure, ACommittedCheckpointWhoseReportFailedIsTakenBack) {
  const test::TemporaryDirectory in_memory("/dev/shm");
  for (const bool checkpoint_only : {false, true}) {
    for (uint64_t n = 1;; n += test::kNextFailure) {
      SCOPED_TRACE(testing::Message() << (checkpoint_only ? "checkpoint" : "sleep") << ", call " << n);
      const std::string directory = in_memory / std::to_string(n) + (checkpoint_only ? "-checkpoint" : "-sleep");
      SleepingEngine slept(file_system_, directory);
      slept.engine.add("a", {1, 2, 3, 4, 5}, 3);
      slept.engine.step();
      file_system_.plan.set(Fault::kError, n);
      const Result<SleepReport> report =
          checkpoint_only ? slept.controller.checkpoint({}) : slept.controller.sleep(to_disk());
      const bool fired = file_system_.plan.fired();
      file_system_.plan.clear();
      if (!report) {
        EXPECT_FALSE(report.error().state_changed);
        EXPECT_FAILS(open_checkpoint(linux_file_system(), directory), Code::kNotFound);
      }
      if (!fired) break;
      ASSERT_LT(n, 300u);
    }
  }
}

std::vector<std::string> checkpoints_in(const std::string& directory) {
  std::vector<std::string> names;
  for (const CheckpointInfo& info : value_of(value_of(CheckpointManager::open(linux_file_system(), directory))->list()))
    names.push_back(info.name);
  return names;
}

// The third makes the first one superfluous, but only once it is known to stay.
TEST_F(SleepFailure, OlderCheckpointsGoOnlyWhenTheNewOneStays) {
  const std::vector<std::string> before{"g-000001", "g-000002"};
  const std::vector<std::string> after{"g-000002", "g-000003"};
  for (const bool checkpoint_only : {false, true}) {
    const std::vector<const char*> hooks =
        checkpoint_only ? std::vector{"rank moved", "rank cancel_save", "resume"}
                        : std::vector{"rank moved", "release_derived", "drop_prefix", "rank detach"};
    for (const char* hook : hooks) {
      SCOPED_TRACE(testing::Message() << (checkpoint_only ? "checkpoint, " : "sleep, ") << hook);
      const std::string directory = temporary_ / hook + (checkpoint_only ? " of a checkpoint" : " of a sleep");
      SleepingEngine slept(file_system_, directory, {}, /*kv_budget=*/0);
      begin(slept.engine, 15);  // one request has ended: what it left in the prefix cache is not kept
      for (int i = 0; i < 2; ++i) ASSERT_SUCCEEDS(slept.controller.checkpoint({}));
      ASSERT_EQ(checkpoints_in(directory), before);
      const auto write = [&] {
        return checkpoint_only ? slept.controller.checkpoint({}) : slept.controller.sleep(to_disk());
      };
      bool failed = false;
      slept.engine.before_hook = [&](const std::string& entered) {
        if (entered != hook) return;
        if (checkpoints_in(directory).size() == 2) return;  // an earlier call of it, before the commit
        failed = true;
        slept.engine.fail_hook(hook, /*always=*/std::string_view(hook) == "resume");
      };
      EXPECT_FAILS(write(), Code::kInternal, hook);
      ASSERT_TRUE(failed);
      slept.engine.before_hook = nullptr;
      slept.engine.fail_hook("");
      if (slept.controller.state().engine == "lost") {  // its last state is on disk, and stays with all others
        EXPECT_EQ(checkpoints_in(directory), (std::vector<std::string>{"g-000001", "g-000002", "g-000003"}));
        continue;
      }
      EXPECT_EQ(checkpoints_in(directory), before);
      ASSERT_SUCCEEDS(write());
      EXPECT_EQ(checkpoints_in(directory), after);
    }
  }
}

// Removing is the last step, and no reason to fail.
TEST_F(SleepFailure, WhateverFailsWhileOlderCheckpointsGoTheNewOneStays) {
  for (const bool checkpoint_only : {false, true}) {
    const test::TemporaryDirectory in_memory("/dev/shm");
    SleepingEngine slept(file_system_, in_memory.path());
    slept.engine.add("a", {1, 2, 3, 4, 5}, 3);
    slept.engine.step();
    for (int i = 0; i < 2; ++i) ASSERT_SUCCEEDS(slept.controller.checkpoint({}));
    int one_more_stayed = 0;
    for (uint64_t n = 1;; ++n) {
      SCOPED_TRACE(testing::Message() << (checkpoint_only ? "checkpoint" : "sleep") << ", call " << n);
      const std::vector<std::string> before = checkpoints_in(in_memory.path());
      ASSERT_EQ(before.size(), 2u);
      file_system_.plan.set(Fault::kError, n);
      const Result<SleepReport> report =
          checkpoint_only ? slept.controller.checkpoint({}) : slept.controller.sleep(to_disk());
      const bool fired = file_system_.plan.fired();
      file_system_.plan.clear();
      const std::vector<std::string> after = checkpoints_in(in_memory.path());
      if (!report) {
        ASSERT_EQ(after, before);
        continue;
      }
      EXPECT_EQ(after.back(), report->checkpoint.substr(report->checkpoint.rfind('/') + 1));
      one_more_stayed += after.size() == 3 ? 1 : 0;
      if (!checkpoint_only) {
        ASSERT_SUCCEEDS(slept.controller.wake_up({}));
      }
      if (!fired) {
        EXPECT_EQ(after, (std::vector<std::string>{before.back(), after.back()}));
        break;
      }
      ASSERT_SUCCEEDS(value_of(CheckpointManager::open(linux_file_system(), in_memory.path()))->collect());
      ASSERT_LT(n, 300u);
    }
    EXPECT_GT(one_more_stayed, 3);
  }
}

// What is on hold has not gone on: a crash now must find the checkpoint as it was.
TEST_F(SleepFailure, ACheckpointIsMarkedAsWokenFromOnlyWhenItsEngineRuns) {
  const std::string path = written_checkpoint();
  const auto marked = [&] { return std::ifstream(path + "/WOKEN").good(); };
  {
    SleepingEngine thrown_away = make();
    ASSERT_SUCCEEDS(thrown_away.controller.wake_up({.from_checkpoint = path, .hold = true}));
    EXPECT_FALSE(marked());
    ASSERT_SUCCEEDS(thrown_away.controller.end_hold(false));
    EXPECT_FALSE(marked());
  }
  SleepingEngine woken = make();
  woken.engine.fail_hook("resume");
  EXPECT_FAILS(woken.controller.wake_up({.from_checkpoint = path}), Code::kInternal, "resume");
  EXPECT_FALSE(marked());
  ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = path, .hold = true}));
  EXPECT_FALSE(marked());
  EXPECT_FAILS(woken.controller.wake_up({.from_checkpoint = path}), Code::kFailedPrecondition, "front end");
  ASSERT_SUCCEEDS(woken.controller.end_hold(true));
  EXPECT_TRUE(marked());
}

}  // namespace
}  // namespace torpor
