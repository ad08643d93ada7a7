// SPDX-License-Identifier: Apache-2.0
// When a sleep to disk or a checkpoint fails (docs/semantics.md, "When something fails"): what becomes of it, of older
// ones, and of what it was to keep.
#include "engine/sleep_controller.h"
#include "tests/engine/sleep_failure.h"
#include "tests/support/sanitizers.h"

namespace torpor {
namespace {

using namespace test;

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
      ASSERT_SUCCEEDS(slept.controller.sleep({.preserve_state = true, .weights = Weights::kReload}));
    }
    ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    EXPECT_FAILS(slept.controller.sleep(to_disk()), Code::kFailedPrecondition, "not loaded");
    slept.engine.load_weights(1);
    EXPECT_TRUE(value_of(slept.controller.sleep(to_disk())).changed);
    ASSERT_SUCCEEDS(slept.controller.wake_up({.old_kv = OldKv::kKeep}));
    EXPECT_EQ(finish(slept.engine), uninterrupted());
  }
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
  for (const char* hook : {"capture", "fingerprint", "rank save", "rank inform", "rank digest"}) {
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

TEST_F(SleepFailure, ACommittedCheckpointWhoseReportFailedIsTakenBack) {
  const test::TemporaryDirectory in_memory("/dev/shm");
  for (const bool checkpoint_only : {false, true}) {
    for (uint64_t n = 1;; n += test::next_failure()) {
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
        checkpoint_only ? std::vector{"rank inform", "rank undo_save", "resume"}
                        : std::vector{"rank inform", "release_derived", "drop_prefix", "rank detach"};
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
      if (slept.controller.state().engine == "unrecoverable") {  // its last state is on disk, and stays with all others
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
    uint64_t one_more_stayed = 0;
    for (uint64_t n = 1;; n += test::next_failure()) {
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
    const bool all_tried = test::next_failure() == 1;  // else each of those calls may be passed over
    EXPECT_TRUE(!all_tried || one_more_stayed > 3u);
  }
}

}  // namespace
}  // namespace torpor
