// SPDX-License-Identifier: Apache-2.0
// When a sleep or checkpoint fails (docs/semantics.md, "When something fails"): one test for each row, and faults
// everywhere. Of a wake: sleep_controller_wake_failure_test.cpp; of what is on disk:
// sleep_controller_checkpoint_failure_test.cpp.
#include "engine/sleep_controller.h"
#include "offload/codec.h"
#include "tests/engine/sleep_failure.h"
#include "tests/support/sanitizers.h"

namespace torpor {
namespace {

using namespace test;

TEST_F(SleepFailure, AlreadyAsleepOrAwakeIsANoOp) {
  SleepingEngine slept = make();
  begin(slept.engine);
  const SleepReport awake = value_of(slept.controller.wake_up({}));
  EXPECT_FALSE(awake.changed);
  EXPECT_TRUE(awake.fully_awake);
  ASSERT_SUCCEEDS(slept.controller.sleep(to_host()));
  const SleepReport again = value_of(slept.controller.sleep(to_host()));
  EXPECT_FALSE(again.changed);
  EXPECT_EQ(again.level, 1);
  // A checkpoint that nobody wrote is no no-op: the caller may end the process next.
  EXPECT_FAILS(slept.controller.sleep(to_disk()), Code::kFailedPrecondition, "asleep already");
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  EXPECT_FAILS(slept.controller.wake_up({.tags = {"weights"}, .from_checkpoint = "/"}), Code::kInvalidArgument, "tags");
  EXPECT_FAILS(slept.controller.wake_up({.from_checkpoint = "/", .old_kv = OldKv::kAbort}), Code::kInvalidArgument,
               "kv");
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

TEST_F(SleepFailure, I7WhereverAHookFailsTheEngineStaysAwakeWithNothingLost) {
  for (const char* hook : {"unsupported", "quiesce", "capture", "fingerprint", "release_derived", "rank describe",
                           "rank save", "rank detach", "rank inform"}) {
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

// The device fails at each of its calls, once: the sleep either happens, or did not happen; if what failed cannot be
// undone the engine says that it is lost.
TEST_F(SleepFailure, I7WhereverTheDeviceFailsASleepIsAllOrNothing) {
  struct How {
    int ranks;
    Codec codec;
  };
  for (const auto& [ranks, codec] : {How{1, Codec::kNone}, How{2, Codec::kNone}, How{2, Codec::kBf16}}) {
    const TestEngineOptions options{.ranks = ranks, .host_compression = codec, .bf16 = codec == Codec::kBf16};
    const TestEngine::Tokens expected = uninterrupted(options);
    uint64_t undone = 0;
    uint64_t lost = 0;
    for (uint64_t n = 1;; n += test::next_failure()) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, " << name(codec) << ", call " << n);
      SleepingEngine slept = make(options);
      begin(slept.engine);
      slept.engine.device(ranks - 1).fail_at(n);
      const Result<SleepReport> report = slept.controller.sleep(to_host());
      const bool fired = slept.engine.device(ranks - 1).fired();
      slept.engine.device(ranks - 1).fail_at(0);
      if (!report && slept.controller.state().engine == "unrecoverable") {
        EXPECT_TRUE(report.error().state_changed);
        EXPECT_FAILS(slept.controller.wake_up({}), Code::kFailedPrecondition, "unrecoverable");
        EXPECT_FAILS(slept.controller.sleep(to_host()), Code::kFailedPrecondition, "unrecoverable");
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
    EXPECT_GE(undone * test::next_failure(), 3u);  // a failed copy of several chunks is mended by trying each again
    if (test::next_failure() == 1) {
      EXPECT_EQ(lost, 9u);  // the release of each region: memory that the device will not give up
    }
  }
}

TEST_F(SleepFailure, I7WhereverAFileOperationFailsASleepToDiskIsAllOrNothing) {
  const TestEngine::Tokens expected = uninterrupted();
  for (const int native : {EIO, ENOSPC}) {
    for (uint64_t n = 1;; n += test::next_failure()) {
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

TEST_F(SleepFailure, OnRequestOnlyRequestsThatFitNowhereAreDropped) {
  for (const bool disk : {false, true}) {
    SCOPED_TRACE(disk);
    SleepingEngine slept = make({.arena_budget_bytes = room_for_weights_only()});
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

TEST_F(SleepFailure, MemoryThatTheMachineDoesNotHaveIsNotTakenAndTheEngineStaysAwake) {
  uint64_t free = 150'000;  // less than the weights
  for (const Codec codec : {Codec::kNone, Codec::kBf16}) {
    SleepingEngine slept = make({.free_memory = [&] { return free; }, .host_compression = codec});
    begin(slept.engine);
    EXPECT_FAILS(slept.controller.sleep(to_host()), Code::kResourceExhausted, "sleep to disk");
    EXPECT_EQ(value_of(slept.controller.ledgers()).front().arena_held_bytes, 0u);
    expect_untouched(slept);
  }
  SleepingEngine slept = make({.free_memory = [&] { return free; }});
  begin(slept.engine);
  EXPECT_FAILS(slept.controller.sleep(to_host()), Code::kResourceExhausted, "are free on this machine");
  free = 2 * kMiB;
  ASSERT_SUCCEEDS(slept.controller.sleep(to_host()));
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  expect_untouched(slept);
}

// No tag is copied in vain.
TEST_F(SleepFailure, MemoryForAllTagsIsThereBeforeAnyIsCopied) {
  SleepingEngine slept = make({.free_memory = [] { return kWeightBytes + 20'000; }});  // of each question
  begin(slept.engine);
  EXPECT_FAILS(slept.controller.sleep(to_host()), Code::kResourceExhausted, "are free on this machine");
  EXPECT_EQ(value_of(slept.controller.ledgers()).front().arena_held_bytes, 0u);
  expect_untouched(slept);
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

TEST_F(SleepFailure, OneLostReplyWhileADetachIsUndoneDoesNotLoseTheEngine) {
  SleepingEngine slept = make({.ranks = 2});
  begin(slept.engine);
  slept.engine.fail_hook("rank detach");
  bool detached = false;
  slept.engine.before_hook = [&](const std::string& hook) {
    if (hook == "rank detach") detached = true;
    if (hook == "rank describe" && std::exchange(detached, false)) slept.engine.fail_hook(hook);
  };
  EXPECT_FAILS(slept.controller.sleep(to_host()), Code::kInternal, "rank detach");
  EXPECT_EQ(slept.controller.state().engine, "awake");
  EXPECT_FALSE(detached);
  expect_untouched(slept, {.ranks = 2});
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

}  // namespace
}  // namespace torpor
