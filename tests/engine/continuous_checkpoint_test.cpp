// SPDX-License-Identifier: Apache-2.0
// A checkpoint that is written while the engine serves: it stands still for the last blocks alone. I7, I8, I10, S1.
#include <filesystem>
#include <thread>

#include <fmt/core.h>

#include "allocator/host_device.h"
#include "base/progress_file.h"
#include "base/units.h"
#include "checkpoint/verify.h"
#include "engine/background_writer.h"
#include "engine/phases.h"
#include "tests/engine/sleep_failure.h"
#include "tests/support/sanitizers.h"

namespace torpor {
namespace {

using namespace test;

// What its clients had when it was taken.
struct Taken {
  SleepReport report;
  TestEngine::Tokens tokens;
  uint64_t steps = 0;
};

class ContinuousCheckpoint : public SleepFailure {
 protected:
  using Variant = TestEngineOptions;
  // In memory: a disk has no part in this.
  TemporaryDirectory temporary_{in_memory()};
  SleepingEngine make(const Variant& options) { return SleepingEngine(file_system_, temporary_.path(), options); }
  static Variant one_thread() { return {.num_blocks = 24, .mix_steps = true, .own_threads = false}; }

  // Steps are taken while it is copied ahead, `before` at least; and `behind` while it is written.
  static Status take(SleepingEngine& serving, int before = 0) {
    TORPOR_RETURN_IF_ERROR(serving.controller.begin_checkpoint());
    while (value_of(serving.controller.continue_checkpoint()) == CheckpointStage::kCopying) {
      if (before > 0) serving.engine.step();
      --before;
    }
    for (; before > 0; --before) serving.engine.step();
    return serving.controller.take_checkpoint({});
  }
  static Result<Taken> checkpoint(SleepingEngine& serving, int before = 0, int behind = 0) {
    TORPOR_RETURN_IF_ERROR(take(serving, before));
    Taken taken{.report = {}, .tokens = serving.engine.tokens(), .steps = serving.engine.steps()};
    EXPECT_FALSE(serving.engine.frozen());
    while (value_of(serving.controller.continue_checkpoint()) == CheckpointStage::kWriting) {
      if (behind-- > 0) serving.engine.step();
    }
    for (; behind > 0; --behind) serving.engine.step();
    TORPOR_ASSIGN_OR_RETURN(taken.report, serving.controller.end_checkpoint());
    return taken;
  }
  void expect_to_wake(const Taken& taken, const Variant& options) {
    const Checkpoint written = value_of(open_checkpoint(linux_file_system(), taken.report.checkpoint, options.key));
    const Verification found = value_of(verify(written));
    EXPECT_TRUE(found.problems.empty()) << found.problems[0].to_string();
    SleepingEngine woken(linux_file_system(), temporary_ / "another", options);
    woken.engine.go_on_from(taken.tokens, taken.steps);
    ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = taken.report.checkpoint}));
    EXPECT_EQ(finish(woken.engine), uninterrupted(options));
    EXPECT_EQ(woken.engine.recomputed(), 0);
  }
  // Entries of the directory that are no checkpoint, and those that are.
  std::vector<std::string> entries() const {
    std::vector<std::string> names;
    if (!std::filesystem::exists(temporary_.path())) return names;
    for (const auto& entry : std::filesystem::directory_iterator(temporary_.path())) {
      if (entry.path().filename() != "LOCK") names.push_back(entry.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  // Return the last phase of this name. A phase before the stop may have the same name as one of the stop.
  static uint64_t phase_bytes(const SleepReport& report, std::string_view name) {
    const auto last = std::find_if(report.phases.rbegin(), report.phases.rend(),
                                   [&](const Phase& phase) { return phase.name == name; });
    if (last != report.phases.rend()) return last->bytes;
    ADD_FAILURE() << "no phase " << name;
    return 0;
  }
  static constexpr uint64_t kOneBlock = kBlockBytes * kKvLayers;
};

// 0: begun. 1: continued once. 2: ready. 3: taken.
Status begin_until(int stage, SleepingEngine& serving, const std::string& progress = "") {
  TORPOR_RETURN_IF_ERROR(serving.controller.begin_checkpoint(progress));
  if (stage == 1) value_of(serving.controller.continue_checkpoint());
  if (stage < 2) return ok();
  while (value_of(serving.controller.continue_checkpoint()) != CheckpointStage::kReady) serving.engine.step();
  if (stage == 3) TORPOR_RETURN_IF_ERROR(serving.controller.take_checkpoint({}));
  return ok();
}

// First touches of memory take longer than the copies into it.
TEST_F(ContinuousCheckpoint, HostMemoryForTheStopIsThereBefore) {
  const auto device = value_of(make_host_device());
  const auto arena = value_of(HostArena::create({.budget_bytes = 4 * kMiB, .slab_bytes = kMiB}));
  const auto transfers = value_of(TransferEngine::create(*device, *arena, {.threads = 1, .own_threads = false}));
  for (const size_t rooms : {0, 3, 5}) {
    BlockingTransfers blocking(*transfers);
    BackgroundWriter behind(blocking, *arena, RankWriting{}, nullptr);
    ASSERT_SUCCEEDS(behind.precopy({}, {}, rooms, kMiB));
    ASSERT_SUCCEEDS(behind.wait_idle());
    const HostArenaInfo ready = arena->info();
    EXPECT_EQ(ready.used_bytes, std::min<uint64_t>(rooms, 4) * kMiB);  // beyond the budget it is taken in the stop
    EXPECT_EQ(ready.held_bytes, ready.used_bytes);
    ASSERT_SUCCEEDS(behind.copy_rest({}));
    EXPECT_EQ(arena->info().used_bytes, 0u);
    EXPECT_EQ(arena->info().held_bytes, ready.held_bytes);
  }
}

TEST_F(ContinuousCheckpoint, ServesMeanwhileAndANewEngineGoesOnFromTheStop) {
  for (const int ranks : {1, 2}) {
    for (const bool incremental : {false, true}) {
      for (const bool own_threads : {false, true}) {
        for (const int before : {1, 9}) {
          SCOPED_TRACE(
              fmt::format("{} ranks, incremental {}, threads {}, {} steps", ranks, incremental, own_threads, before));
          std::filesystem::remove_all(temporary_.path());
          Variant options{.ranks = ranks,
                          .num_blocks = 24,
                          .mix_steps = true,
                          .incremental = incremental,
                          .own_threads = own_threads};
          if (ranks == 2) options.key = std::make_shared<const Key>(std::array<uint8_t, kKeyBytes>{1, 2, 3});
          SleepingEngine serving = make(options);
          begin(serving.engine, 2);
          const Taken first = value_of(checkpoint(serving, before, 2));
          expect_to_wake(first, options);
          const Taken second = value_of(checkpoint(serving, before, 2));
          EXPECT_NE(second.report.checkpoint, first.report.checkpoint);
          EXPECT_EQ(second.report.reused_bytes > 0, incremental);
          expect_to_wake(second, options);
          expect_untouched(serving, options);
        }
      }
    }
  }
}

TEST_F(ContinuousCheckpoint, TheStopCopiesOnlyWhatWasNotFullBefore) {
  const Variant options{.num_blocks = 64, .mix_steps = true, .own_threads = false};
  SleepingEngine serving = make(options);
  begin(serving.engine);
  const Taken taken = value_of(checkpoint(serving));
  const auto blocks = static_cast<uint64_t>(taken.report.kept_blocks);
  const uint64_t tail = phase_bytes(taken.report, "save");
  EXPECT_EQ(taken.report.saved_bytes, blocks * kOneBlock + kRuntimeBytes);
  EXPECT_LE(tail, 3 * kOneBlock + kRuntimeBytes);  // one that is being filled, of each of the requests that run
  EXPECT_GE(blocks, 10u);
  // Steps between fill some more.
  const Taken later = value_of(checkpoint(serving, 4));
  EXPECT_GT(phase_bytes(later.report, "save"), tail);
  EXPECT_LE(phase_bytes(later.report, "save"), 6 * kOneBlock + kRuntimeBytes);
}

// In the stop the blocks have other bytes than those that were copied ahead.
TEST_F(ContinuousCheckpoint, WhatWritesBlocksBesideTheEngineVoidsWhatWasCopiedAhead) {
  const Variant options{.num_blocks = 64, .mix_steps = true, .own_threads = false};
  for (const bool written : {false, true}) {
    SleepingEngine serving = make(options);
    begin(serving.engine);
    ASSERT_SUCCEEDS(begin_until(2, serving));
    for (int rank = 0; written && rank < options.ranks; ++rank) serving.engine.memory(rank).mark_dirty("kv_cache");
    ASSERT_SUCCEEDS(serving.controller.take_checkpoint({}));
    const SleepReport report = value_of(serving.controller.end_checkpoint());
    const uint64_t copied_in_stop = phase_bytes(report, "save");
    const uint64_t all = static_cast<uint64_t>(report.kept_blocks) * kOneBlock + kRuntimeBytes;
    EXPECT_EQ(copied_in_stop == all, written) << copied_in_stop << " of " << all;
  }
}

// A link would keep a file that is little in use, so its unchanged blocks are written again. The report counts them.
TEST_F(ContinuousCheckpoint, OfUnchangedBlocksTheReportSaysHowManyItWroteAgain) {
  const Variant options{.num_blocks = 64, .mix_steps = true, .incremental = true, .own_threads = false};
  SleepingEngine serving = make(options);
  begin(serving.engine);
  value_of(checkpoint(serving));
  uint64_t compacted = 0;
  for (int turn = 0; turn < 12; ++turn) {
    const SleepReport report = value_of(checkpoint(serving, 1)).report;
    compacted += report.compacted_bytes;
    EXPECT_LE(report.saved_bytes - report.compacted_bytes, 6 * kOneBlock + kRuntimeBytes) << turn;
  }
  EXPECT_GT(compacted, 0u);
}

// All else was asked before, or is done after.
TEST_F(ContinuousCheckpoint, InTheStopTheEngineIsAskedForItsStateAndTheRanksOnce) {
  const Variant options = one_thread();
  SleepingEngine serving = make(options);
  begin(serving.engine);
  ASSERT_SUCCEEDS(begin_until(2, serving));
  std::vector<std::string> hooks;
  serving.engine.before_hook = [&](const std::string& hook) { hooks.push_back(hook); };
  ASSERT_SUCCEEDS(serving.controller.take_checkpoint({}));
  EXPECT_EQ(hooks, (std::vector<std::string>{"unsupported", "quiesce", "unfinished_requests", "capture",
                                             "rank stop_and_copy", "resume"}));
  const TestEngine::Tokens tokens = serving.engine.tokens();
  const uint64_t steps = serving.engine.steps();
  serving.engine.step();  // what is read later is of the stop
  const SleepReport report = value_of(serving.controller.end_checkpoint());
  EXPECT_EQ(std::count(hooks.begin(), hooks.end(), "read moment"), 1);
  expect_to_wake({.report = report, .tokens = tokens, .steps = steps}, options);
  serving.engine.before_hook = nullptr;
  expect_untouched(serving, options);
}

TEST_F(ContinuousCheckpoint, WeightsWithoutContentAreRefusedBeforeAnythingIsCopied) {
  const Variant options = one_thread();
  SleepingEngine serving = make(options);
  begin(serving.engine);
  ASSERT_SUCCEEDS(serving.controller.sleep({.level = 2, .in_flight = "abort"}));
  ASSERT_SUCCEEDS(serving.controller.wake_up({}));
  ASSERT_SUCCEEDS(serving.controller.begin_checkpoint());
  EXPECT_EQ(value_of(serving.controller.continue_checkpoint()), CheckpointStage::kEnded);
  EXPECT_TRUE(failed_with(serving.controller.end_checkpoint(), Code::kFailedPrecondition, "without content"));
  EXPECT_TRUE(entries().empty());
  serving.engine.load_weights(1);
  value_of(checkpoint(serving));
}

TEST_F(ContinuousCheckpoint, AnIncrementalOneWritesOnlyNewBlocks) {
  Variant options{.num_blocks = 64, .mix_steps = true, .incremental = true, .own_threads = false};
  SleepingEngine serving = make(options);
  begin(serving.engine);
  value_of(checkpoint(serving));
  const Taken again = value_of(checkpoint(serving));
  EXPECT_EQ(again.report.saved_bytes, kRuntimeBytes);
  for (int i = 0; i < 4; ++i) serving.engine.step();
  const Taken later = value_of(checkpoint(serving));
  EXPECT_GT(later.report.saved_bytes, kRuntimeBytes);
  EXPECT_LE(later.report.saved_bytes, 6 * kOneBlock + kRuntimeBytes);
  expect_to_wake(later, options);
}

// The digest of the weights is taken in the background, once, and never of weights that were written meanwhile.
TEST_F(ContinuousCheckpoint, TheWeightsAreReadOnceAndNotInTheStop) {
  const Variant options = one_thread();
  for (const bool named : {false, true}) {
    SCOPED_TRACE(named ? "named" : "the whole tag");
    SleepingEngine serving = make(options);
    if (named) serving.engine.name_weights();
    begin(serving.engine);
    value_of(checkpoint(serving));
    value_of(checkpoint(serving));
    serving.engine.load_weights(1);
    value_of(checkpoint(serving));
    EXPECT_EQ(serving.engine.hashed_bytes(), 0u);  // of those that an order waits for
    // The stop reads weights again that were written, or may have been, while the background read them.
    for (const bool written : {false, true}) {
      ASSERT_SUCCEEDS(serving.controller.begin_checkpoint());
      EXPECT_EQ(value_of(serving.controller.continue_checkpoint()), CheckpointStage::kReady);
      serving.engine.load_weights(written ? 2 : 1, written);
      serving.engine.memory().invalidate_digest("weights");
      ASSERT_SUCCEEDS(serving.controller.take_checkpoint({}));
      const std::string path = value_of(serving.controller.end_checkpoint()).checkpoint;
      EXPECT_GT(serving.engine.hashed_bytes(), 0u);
      SleepingEngine woken(linux_file_system(), temporary_ / "another", options);
      if (named) woken.engine.name_weights();
      const auto result = woken.controller.wake_up({.from_checkpoint = path});
      EXPECT_EQ(result.has_value(), !written);
      EXPECT_EQ(failed_with(result, Code::kIncompatible, "weights_digest"), written);
    }
  }
}

TEST_F(ContinuousCheckpoint, WithoutRoomInHostMemoryThereIsNone) {
  Variant options = one_thread();
  options.arena_budget_bytes = kPage;
  SleepingEngine serving = make(options);
  begin(serving.engine);
  EXPECT_TRUE(failed_with(checkpoint(serving, 1, 1), Code::kResourceExhausted, "host"));
  EXPECT_TRUE(entries().empty());
  expect_untouched(serving, options);
}

TEST_F(ContinuousCheckpoint, EachFileOperationThatFailsLeavesTheEngineServingAndNothingBehind) {
  uint64_t calls = 1;  // counted in round 0, which fails at none
  for (uint64_t at = 0; at <= calls; at += test::next_failure()) {
    SCOPED_TRACE(at);
    std::filesystem::remove_all(temporary_.path());
    const Variant options = one_thread();
    SleepingEngine serving = make(options);
    begin(serving.engine);
    const Taken before = value_of(checkpoint(serving));
    file_system_.plan.set(at == 0 ? Fault::kNone : Fault::kError, at);
    const Result<Taken> taken = checkpoint(serving, 1, 1);
    if (at == 0) calls = file_system_.plan.calls;
    file_system_.plan.clear();
    EXPECT_EQ(serving.controller.state().engine, "awake");
    if (!taken) {
      EXPECT_FALSE(taken.error().state_changed);
      expect_to_wake(before, options);
    } else {
      expect_to_wake(*taken, options);
    }
    ASSERT_SUCCEEDS(checkpoint(serving));
    for (const std::string& entry : entries()) EXPECT_TRUE(entry.starts_with("g-") || entry == "another") << entry;
    expect_untouched(serving, options);
  }
  EXPECT_GT(calls, 20U);
}

TEST_F(ContinuousCheckpoint, EachHookThatFailsLeavesTheEngineServing) {
  for (const std::string hook :
       {"unsupported", "quiesce", "kv_contents", "unfinished_requests", "capture", "read moment", "fingerprint",
        "rank describe", "rank open_save", "rank precopy", "rank stop_and_copy", "rank poll_save"}) {
    SCOPED_TRACE(hook);
    std::filesystem::remove_all(temporary_.path());
    const Variant options = one_thread();
    SleepingEngine serving = make(options);
    begin(serving.engine);
    serving.engine.fail_hook(hook);
    EXPECT_TRUE(failed_with(checkpoint(serving), Code::kInternal, "injected"));
    serving.engine.fail_hook("");
    EXPECT_EQ(serving.controller.state().engine, "awake");
    EXPECT_TRUE(entries().empty());
    const Taken taken = value_of(checkpoint(serving));
    expect_to_wake(taken, options);
    expect_untouched(serving, options);
  }
}

TEST_F(ContinuousCheckpoint, ASleepGivesUpOneThatWasNotTakenAndWaitsForOneThatWas) {
  for (const bool threads : {false, true}) {
    for (const bool taken : {false, true}) {
      for (const bool disk : {false, true}) {
        SCOPED_TRACE(fmt::format("threads {}, taken {}, disk {}", threads, taken, disk));
        std::filesystem::remove_all(temporary_.path());
        Variant options = one_thread();
        options.own_threads = threads;
        SleepingEngine serving = make(options);
        begin(serving.engine);
        if (taken) {
          ASSERT_SUCCEEDS(take(serving));
        } else {
          ASSERT_SUCCEEDS(serving.controller.begin_checkpoint());
          value_of(serving.controller.continue_checkpoint());
        }
        EXPECT_TRUE(failed_with(serving.controller.begin_checkpoint(), Code::kUnavailable, "being written"));
        ASSERT_SUCCEEDS(serving.controller.sleep(disk ? to_disk() : to_host()));
        const Result<SleepReport> ended = serving.controller.end_checkpoint();
        EXPECT_EQ(ended.has_value(), taken);
        if (!taken) {
          EXPECT_TRUE(failed_with(ended, Code::kAborted, "a sleep was asked for"));
        }
        EXPECT_EQ(entries().size(), (taken ? 1u : 0u) + (disk ? 1u : 0u));
        EXPECT_TRUE(failed_with(serving.controller.begin_checkpoint(), Code::kFailedPrecondition, "asleep"));
        ASSERT_SUCCEEDS(serving.controller.wake_up({}));
        expect_untouched(serving, options);
      }
    }
  }
}

TEST_F(ContinuousCheckpoint, CancelledAtAnyMomentItLeavesNothing) {
  for (const bool threads : {false, true}) {
    for (int stage = 0; stage < 4; ++stage) {
      SCOPED_TRACE(fmt::format("threads {}, stage {}", threads, stage));
      std::filesystem::remove_all(temporary_.path());
      Variant options = one_thread();
      options.own_threads = threads;
      SleepingEngine serving = make(options);
      begin(serving.engine);
      ASSERT_SUCCEEDS(begin_until(stage, serving));
      serving.controller.cancel_checkpoint();
      EXPECT_TRUE(entries().empty());
      EXPECT_EQ(value_of(serving.controller.continue_checkpoint()), CheckpointStage::kNone);
      EXPECT_TRUE(failed_with(serving.controller.end_checkpoint(), Code::kFailedPrecondition, "no checkpoint"));
      EXPECT_TRUE(failed_with(serving.controller.take_checkpoint({}), Code::kFailedPrecondition, "ready"));
      expect_untouched(serving, options);
    }
  }
}

TEST_F(ContinuousCheckpoint, WhoWatchesSeesItsPhasesAndEachByte) {
  for (const bool threads : {false, true}) {
    SCOPED_TRACE(threads);
    std::filesystem::remove_all(temporary_.path());
    Variant options = one_thread();
    options.own_threads = threads;
    options.ranks = 2;
    SleepingEngine serving = make(options);
    begin(serving.engine, 2);
    const TemporaryDirectory watching;
    const std::string path = watching / "progress";
    const std::shared_ptr<ProgressFile> page = value_of(ProgressFile::create(path));
    const auto phase = [&] { return kPhaseNames.at(page->phase()); };
    ASSERT_SUCCEEDS(serving.controller.begin_checkpoint(path));
    EXPECT_EQ(phase(), "open");
    while (value_of(serving.controller.continue_checkpoint()) == CheckpointStage::kCopying) std::this_thread::yield();
    EXPECT_EQ(phase(), "save");
    const uint64_t ahead = page->read().bytes_done;
    EXPECT_GT(ahead, 0u);
    EXPECT_EQ(page->read().bytes_total, ahead);
    ASSERT_SUCCEEDS(serving.controller.take_checkpoint({}));
    EXPECT_EQ(phase(), "commit");
    EXPECT_GT(page->read().bytes_total, ahead);
    const SleepReport report = value_of(serving.controller.end_checkpoint());
    EXPECT_EQ(phase(), "verify");
    EXPECT_EQ(page->read().bytes_total, report.saved_bytes);
    EXPECT_EQ(page->read().bytes_done, report.saved_bytes);
    expect_untouched(serving, options);
  }
}

TEST_F(ContinuousCheckpoint, WhoWatchesMayCancelItAtAnyMoment) {
  for (const bool threads : {false, true}) {
    for (int stage = 0; stage < 4; ++stage) {
      SCOPED_TRACE(fmt::format("threads {}, stage {}", threads, stage));
      std::filesystem::remove_all(temporary_.path());
      Variant options = one_thread();
      options.own_threads = threads;
      SleepingEngine serving = make(options);
      begin(serving.engine);
      const TemporaryDirectory watching;
      const std::string path = watching / "progress";
      const std::shared_ptr<ProgressFile> page = value_of(ProgressFile::create(path));
      ASSERT_SUCCEEDS(begin_until(stage, serving, path));
      page->cancel();
      if (stage == 2) {
        EXPECT_TRUE(failed_with(serving.controller.take_checkpoint({}), Code::kAborted, "watches"));
      }
      EXPECT_EQ(value_of(serving.controller.continue_checkpoint()), CheckpointStage::kEnded);
      EXPECT_TRUE(failed_with(serving.controller.end_checkpoint(), Code::kAborted, "watches"));
      EXPECT_TRUE(entries().empty());
      expect_untouched(serving, options);
    }
  }
}

TEST_F(ContinuousCheckpoint, AnEngineThatEndsMeanwhileLeavesNothing) {
  for (const bool taken : {false, true}) {
    SleepingEngine serving = make({.num_blocks = 24});
    begin(serving.engine);
    if (taken) {
      ASSERT_SUCCEEDS(take(serving));
    } else {
      ASSERT_SUCCEEDS(serving.controller.begin_checkpoint());
    }
  }
  EXPECT_TRUE(entries().empty());
}

}  // namespace
}  // namespace torpor
