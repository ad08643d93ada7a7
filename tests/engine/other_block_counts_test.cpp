// SPDX-License-Identifier: Apache-2.0
// A new process with another number of KV blocks than the one that slept goes on all the same: blocks get other
// numbers, cached ones go where there is no room, and only requests that do not fit are refused.
#include <filesystem>

#include <fmt/core.h>

#include "checkpoint/verify.h"
#include "engine/delivery/roll_forward.h"
#include "scheduler_state/block_numbers.h"
#include "tests/engine/sleep_failure.h"

namespace torpor {
namespace {

using namespace test;

constexpr int32_t kSaved = 64;
constexpr int kStepsBefore = 6;

class OtherBlockCounts : public SleepFailure {
 protected:
  using Options = TestEngineOptions;
  static Options with(int32_t num_blocks, int ranks = 1) {
    Options options{.ranks = ranks, .num_blocks = num_blocks, .mix_steps = true, .incremental = true};
    if (ranks > 1) options.key = std::make_shared<const Key>(std::array<uint8_t, kKeyBytes>{1, 2, 3});  // encrypted
    return options;
  }
  // Requests that have ended before leave cached blocks, and bring those of the others to the end of the pool: all have
  // numbers that a small engine has not.
  static void serve(TestEngine& engine) {
    engine.add("first", std::vector<int32_t>(70, 2), 80);
    engine.add("second", std::vector<int32_t>(30, 3), 40);
    engine.run();
    add_example_requests(engine);
    for (int i = 0; i < kStepsBefore; ++i) engine.step();
  }
  static TestEngine::Tokens expected(int ranks = 1) {
    TestEngine engine(linux_file_system(), with(kSaved, ranks));
    serve(engine);
    return finish(engine);
  }
  struct Slept {
    std::string path;
    KvSnapshot kv;
    std::unique_ptr<SleepingEngine> engine;
  };
  Slept slept(int ranks = 1) {
    Slept slept;
    slept.engine = std::make_unique<SleepingEngine>(file_system_, temporary_.path(), with(kSaved, ranks));
    serve(slept.engine->engine);
    slept.kv = value_of(slept.engine->engine.capture()).kv;
    slept.path = value_of(slept.engine->controller.sleep(to_disk())).checkpoint;
    return slept;
  }
  static int64_t held_beyond(const KvSnapshot& kv, int32_t num_blocks) {
    return std::count_if(kv.blocks.begin(), kv.blocks.end(),
                         [num_blocks](const KvBlock& block) { return block.ref_count > 0 && block.id >= num_blocks; });
  }
};

TEST_F(OtherBlockCounts, TokensAreTheSameInAnEngineWithMoreOrFewer) {
  for (const int ranks : {1, 2}) {
    std::filesystem::remove_all(temporary_.path());
    const Slept before = slept(ranks);
    const auto cached = static_cast<int64_t>(before.kv.blocks.size()) - fewest_blocks(before.kv) + 1;
    ASSERT_GT(cached, 20);
    for (const int32_t here : {200, 65, 64, 63, 40, 28}) {
      SCOPED_TRACE(fmt::format("{} ranks, {} blocks", ranks, here));
      SleepingEngine woken(file_system_, temporary_ / "another", with(here, ranks));
      woken.engine.go_on_after(before.engine->engine);
      const SleepReport report = value_of(woken.controller.wake_up({.from_checkpoint = before.path}));
      EXPECT_EQ(report.dropped_blocks, std::max<int64_t>(0, fewest_blocks(before.kv) + cached - here));
      EXPECT_EQ(report.note.find("had no room") != std::string::npos, report.dropped_blocks > 0) << report.note;
      EXPECT_EQ(report.kept_blocks, static_cast<int64_t>(before.kv.blocks.size()) - report.dropped_blocks);
      const CapturedState state = value_of(woken.engine.capture());
      EXPECT_SUCCEEDS(state.validate());
      EXPECT_EQ(finish(woken.engine), expected(ranks));
      EXPECT_EQ(woken.engine.recomputed(), 0);
    }
    EXPECT_GT(held_beyond(before.kv, 28), 3);
  }
}

TEST_F(OtherBlockCounts, RequestsThatDoNotFitAreRefusedWithTheNumberThatWouldDo) {
  const Slept before = slept();
  const int32_t fewest = fewest_blocks(before.kv);
  SleepingEngine small(file_system_, temporary_ / "another", with(fewest - 1));
  const Result<SleepReport> refused = small.controller.wake_up({.from_checkpoint = before.path});
  EXPECT_FAILS(refused, Code::kIncompatible,
               fmt::format("hold {} KV blocks, and this engine has {}", fewest - 1, fewest - 1));
  EXPECT_NE(refused.error().next_step.find(fmt::format("--num-gpu-blocks-override {}", fewest)), std::string::npos);
  EXPECT_NE(refused.error().next_step.find(fmt::format("--kv-cache-memory-bytes {}", fewest * kBlockBytes * kKvLayers)),
            std::string::npos);
  EXPECT_FALSE(refused.error().state_changed);
  EXPECT_EQ(small.controller.state().engine, "awake");
  small.engine.add("own", {1, 2, 3}, 4);
  small.engine.run();
  EXPECT_EQ(small.engine.tokens().at("own").size(), 4u);

  SleepingEngine enough(file_system_, temporary_ / "another", with(fewest));
  EXPECT_EQ(value_of(enough.controller.wake_up({.from_checkpoint = before.path})).requests, 3);
}

// Those that were answered to the end since need no room any more.
TEST_F(OtherBlockCounts, RequestsThatHaveEndedSinceTakeNoRoom) {
  const Slept before = slept();
  const int32_t fewest = fewest_blocks(before.kv);
  const CapturedState state = value_of(open_checkpoint(linux_file_system(), before.path)).read_state().value().state;
  std::vector<Answer> answers;
  for (const RequestState& request : state.scheduler.requests)
    answers.push_back(
        {.request = request, .state = request.id == "c" ? AnswerState::kFinished : AnswerState::kRunning});
  RolledForward rolled;
  SleepingEngine woken(file_system_, temporary_ / "another", with(fewest - 1));
  EXPECT_FAILS(woken.controller.wake_up({.from_checkpoint = before.path}), Code::kIncompatible);
  ASSERT_SUCCEEDS(woken.controller.wake_up(
      {.from_checkpoint = before.path, .catch_up = catch_up_with(std::move(answers), rolled)}));
  EXPECT_EQ(rolled.dropped, std::vector<std::string>{"c"});
}

// The next checkpoint takes over what the one before has, under the numbers that it has there. Where a seal binds those
// numbers, blocks that have others are written again.
TEST_F(OtherBlockCounts, TheNextCheckpointLinksBlocksUnderTheirNewNumbers) {
  for (const auto& [serving, ranks] :
       {std::pair(false, 1), std::pair(true, 1), std::pair(false, 2), std::pair(true, 2)}) {
    SCOPED_TRACE(fmt::format("{}, {} ranks", serving ? "serving" : "asleep", ranks));
    std::filesystem::remove_all(temporary_.path());
    const Options options = with(28, ranks);
    const bool sealed = ranks > 1;
    Slept before = slept(ranks);
    SleepingEngine woken(file_system_, temporary_.path(), options);
    woken.engine.go_on_after(before.engine->engine);
    ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = before.path}));
    std::string path;
    for (const int steps : {0, 1}) {
      for (int i = 0; i < steps; ++i) woken.engine.step();
      const SleepReport again = value_of(serving ? woken.controller.checkpoint({}) : woken.controller.sleep(to_disk()));
      // What is neither weights nor KV is written each time.
      const uint64_t of_blocks = again.saved_bytes - static_cast<uint64_t>(ranks) * kRuntimeBytes;
      if (steps == 0) {
        EXPECT_EQ(of_blocks > 0, sealed) << of_blocks;
      } else {
        EXPECT_LE(of_blocks, ranks * 8 * kBlockBytes * kKvLayers);
      }
      EXPECT_GT(again.reused_bytes, 0u);
      path = again.checkpoint;
      const Checkpoint written = value_of(open_checkpoint(linux_file_system(), path, options.key));
      EXPECT_TRUE(value_of(verify(written)).problems.empty());
      if (serving) continue;
      ASSERT_SUCCEEDS(woken.controller.wake_up({}));
    }
    SleepingEngine last(file_system_, temporary_ / "another", with(40, ranks));
    last.engine.go_on_after(woken.engine);
    ASSERT_SUCCEEDS(last.controller.wake_up({.from_checkpoint = path}));
    EXPECT_EQ(finish(last.engine), expected(ranks));
    EXPECT_EQ(finish(woken.engine), expected(ranks));
  }
}

TEST_F(OtherBlockCounts, APostCopyWakeBringsThemBehindTheEngineUnderTheirNewNumbers) {
  const Slept before = slept();
  SleepingEngine woken(file_system_, temporary_ / "another", with(40));
  woken.engine.can_hold = true;
  woken.engine.go_on_after(before.engine->engine);
  const SleepReport report = value_of(woken.controller.wake_up({.from_checkpoint = before.path, .early = true}));
  EXPECT_GT(report.deferred_blocks, 0);
  EXPECT_EQ(value_of(woken.controller.continue_wake(DeferredWait::kAll)).arrived, report.deferred_blocks);
  EXPECT_EQ(finish(woken.engine), expected());
}

}  // namespace
}  // namespace torpor
