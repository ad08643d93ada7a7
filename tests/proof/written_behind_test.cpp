// SPDX-License-Identifier: Apache-2.0
// A process is killed at any file operation of a checkpoint that is written while it serves: the one before it is
// there, whole, and so is this one if it was acknowledged. A new engine goes on from either with the very tokens.
#include <fmt/core.h>

#include "checkpoint/verify.h"
#include "tests/proof/killed_child.h"
#include "tests/support/sleeping_engine.h"

namespace torpor::proof {
namespace {

using test::Fault;
using test::SleepingEngine;

constexpr int kStepsBefore = 3;
constexpr int kStepsAhead = 2;
constexpr int kStepsBehind = 2;

test::TestEngineOptions options(bool incremental) {
  return {.num_blocks = 24, .mix_steps = true, .incremental = incremental, .own_threads = false};
}

// `say` is told the number of steps taken when each one was taken, once it is acknowledged.
Status serve(FileSystem& file_system, const std::string& directory, bool incremental, const Say& say) {
  SleepingEngine serving(file_system, directory, options(incremental));
  test::add_example_requests(serving.engine);
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < kStepsBefore; ++i) serving.engine.step();
    TORPOR_RETURN_IF_ERROR(serving.controller.begin_checkpoint());
    TORPOR_ASSIGN_OR_RETURN(const CheckpointStage ahead, serving.controller.continue_checkpoint());
    if (ahead != CheckpointStage::kReady) return Error{.what = "it is not ready"};
    for (int i = 0; i < kStepsAhead; ++i) serving.engine.step();
    TORPOR_RETURN_IF_ERROR(serving.controller.take_checkpoint({}));
    for (int i = 0; i < kStepsBehind; ++i) serving.engine.step();
    TORPOR_RETURN_IF_ERROR(serving.controller.end_checkpoint());
    say('t', static_cast<char>(round + 1));
  }
  return ok();
}

// What was given when the checkpoint of this round was taken.
void run_to(test::TestEngine& engine, uint64_t round) {
  test::add_example_requests(engine);
  const int steps = (kStepsBefore + kStepsAhead) * static_cast<int>(round) + kStepsBehind * static_cast<int>(round - 1);
  for (int i = 0; i < steps; ++i) engine.step();
}

TEST(WrittenBehind, KilledAtAnyFileOperationItsCheckpointsAreWhole) {
  int points = 0;
  const char* const memory = test::in_memory();
  for (const bool incremental : {false, true}) {
    const test::TestEngine::Tokens expected = test::uninterrupted(options(incremental));
    test::FaultyFileSystem whole;
    std::set<uint64_t> writes;
    whole.plan.writes = &writes;
    {
      const test::TemporaryDirectory temporary(memory);
      ASSERT_SUCCEEDS(serve(whole, temporary / "store", incremental, [](char, char) {}));
    }
    for (const Fault fault : {Fault::kKillBefore, Fault::kKillAfter, Fault::kKillTorn}) {
      for (uint64_t n = 1; n <= whole.plan.calls; ++n) {
        if (fault == Fault::kKillTorn && !writes.contains(n)) continue;
        SCOPED_TRACE(fmt::format("incremental {}, call {}, mode {}", incremental, n, static_cast<int>(fault)));
        const test::TemporaryDirectory temporary(memory);
        const std::string store = temporary / "store";
        uint64_t acknowledged = 0;
        const Ending ending = run_killed(
            fault, n, [&](FileSystem& files, const Say& say) { return serve(files, store, incremental, say); },
            [&](char, char round) { acknowledged = static_cast<uint64_t>(round); });
        ASSERT_TRUE(ending.killed);
        ++points;
        test::FaultyFileSystem plain;
        const auto manager = test::value_of(CheckpointManager::open(plain, store));
        const Result<std::vector<CheckpointInfo>> there = manager->list();
        const uint64_t newest = there && !there->empty() ? there->back().manifest.generation : 0;
        ASSERT_GE(newest, acknowledged);
        if (newest == 0) continue;
        const Checkpoint checkpoint = test::value_of(manager->open_latest());
        const Verification found = test::value_of(verify(checkpoint, {.threads = 1}));
        ASSERT_TRUE(found.problems.empty()) << found.problems[0].to_string();
        SleepingEngine served(plain, temporary / "other", options(incremental));
        run_to(served.engine, newest);
        SleepingEngine woken(plain, store, options(incremental));
        woken.engine.go_on_after(served.engine);
        ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = store}));
        ASSERT_EQ(test::finish(woken.engine), expected);
      }
    }
  }
  std::printf("proof: written behind: killed at %d points, 0 broken promises\n", points);
  EXPECT_GE(points, 300);
}

}  // namespace
}  // namespace torpor::proof
