// SPDX-License-Identifier: Apache-2.0
// A sleep after a wake in the same process copies of KV only what changed since: S1, S8, I10.
#include "allocator/host_device.h"
#include "base/units.h"
#include "tests/engine/sleep_failure.h"
#include "tests/support/rank_call.h"
#include "tests/support/sanitizers.h"

namespace torpor {
namespace {

using namespace test;

// --- one rank ---

class RetainedKv : public ::testing::Test {
 protected:
  static constexpr uint64_t kBytes = 6000;  // of a block
  static constexpr uint32_t kBlocks = 8;
  static constexpr uint64_t kMuch = kMiB;

  void make(uint64_t retain, uint64_t arena_budget = 0) {
    memory_ = value_of(RankMemory::create(
        value_of(make_host_device()), linux_file_system(),
        {.arena_budget_bytes = arena_budget, .arena_slab_bytes = 64 * kKiB, .threads = 1, .retain_kv_bytes = retain}));
    kv_ = value_of(memory_->allocate("kv_cache", "kv", kBlocks * kBytes));
    must(memory_->set_kv_layout("kv_cache", layout()));
  }
  KvLayout layout() const {
    return {
        .num_blocks = kBlocks,
        .tensors = {{.address = kv_, .layers = 1, .layer_stride = 1, .block_stride = kBytes, .block_bytes = kBytes}}};
  }
  static void must(const Status& status) { ASSERT_SUCCEEDS(status); }
  std::byte& byte_of(int32_t block) {
    return *reinterpret_cast<std::byte*>(kv_ + static_cast<uint64_t>(block) * kBytes);  // NOLINT
  }
  void write(int32_t block, int value) { std::memset(&byte_of(block), value, kBytes); }
  bool holds(int32_t block, int value) {
    return std::all_of(&byte_of(block), &byte_of(block) + kBytes,
                       [&](std::byte byte) { return byte == static_cast<std::byte>(value); });
  }
  template <class Order>
  typename Order::Reply call(const Order& order) {
    SCOPED_TRACE(Order::kName);
    return value_of(call_rank(*memory_, order));
  }
  static orders::Save saving(std::vector<int32_t> blocks, std::vector<uint64_t> versions, uint64_t steps) {
    return {.tags = {"kv_cache"}, .blocks = std::move(blocks), .versions = std::move(versions), .steps = steps};
  }
  void detach() { call(orders::Detach{.tags = {"kv_cache"}}); }
  void wake(bool keep = true) {
    call(orders::Restore{.tags = {"kv_cache"}});
    call(orders::Finish{.tags = {"kv_cache"}, .keep_backup = keep});
  }
  // Blocks copied and reused.
  using Moved = std::pair<uint64_t, uint64_t>;
  Moved save(const orders::Save& order) {
    const orders::Save::Reply reply = call(order);
    return {reply.bytes / kBytes, reply.reused_bytes / kBytes};
  }
  Moved sleep_and_wake(const orders::Save& order) {
    const Moved moved = save(order);
    detach();
    wake();
    return moved;
  }
  uint64_t retained() const { return memory_->ledger().tags.at("kv_cache").backup_host_bytes / kBytes; }

  std::unique_ptr<RankMemory> memory_;
  DeviceAddress kv_ = 0;
};

TEST_F(RetainedKv, WithoutAStepNothingIsCopiedAgain) {
  make(kMuch);
  write(1, 11), write(2, 12), write(3, 13);
  const orders::Save order = saving({1, 2, 3}, {5, 0, 6}, 9);
  EXPECT_EQ(sleep_and_wake(order), Moved(3, 0));
  EXPECT_EQ(retained(), 3u);
  for (int again = 0; again < 3; ++again) {
    EXPECT_EQ(save(order), Moved(0, 3));
    detach();
    const RankLedger::Tag asleep = memory_->ledger().tags.at("kv_cache");
    EXPECT_EQ(asleep.backup_host_bytes, 3 * kBytes);
    EXPECT_EQ(asleep.reused_bytes, 3 * kBytes);
    wake();
    EXPECT_TRUE(holds(1, 11) && holds(2, 12) && holds(3, 13));
  }
}

TEST_F(RetainedKv, S1ABlockIsTakenOverByItsStampNeverByItsNumber) {
  make(kMuch);
  write(1, 11), write(2, 12), write(3, 13);
  sleep_and_wake(saving({1, 2, 3}, {5, 6, 7}, 9));
  write(2, 22);  // evicted and computed again, perhaps under the same hash
  write(4, 14);  // its version was another block's: it says nothing here
  EXPECT_EQ(sleep_and_wake(saving({1, 2, 3, 4}, {5, 8, 7, 6}, 10)), Moved(2, 2));
  EXPECT_TRUE(holds(1, 11) && holds(2, 22) && holds(3, 13) && holds(4, 14));
}

TEST_F(RetainedKv, S8WhatHasNoStampIsCopiedAfterEachStep) {
  make(kMuch);
  write(1, 11), write(2, 12);
  sleep_and_wake(saving({1, 2}, {5, 0}, 9));
  write(2, 22);
  EXPECT_EQ(sleep_and_wake(saving({1, 2}, {5, 0}, 10)), Moved(1, 1));
  EXPECT_TRUE(holds(1, 11) && holds(2, 22));
  write(2, 32);  // full now
  EXPECT_EQ(sleep_and_wake(saving({1, 2}, {5, 6}, 11)), Moved(1, 1));
  // Without a hash any more it has no version, and whoever does not say the steps gets no block without one.
  EXPECT_EQ(sleep_and_wake(saving({1, 2}, {5, 0}, 0)), Moved(1, 1));
  EXPECT_EQ(sleep_and_wake(saving({1, 2}, {}, 0)), Moved(2, 0));
  EXPECT_EQ(sleep_and_wake(saving({1, 2}, {}, 0)), Moved(2, 0));
  EXPECT_TRUE(holds(1, 11) && holds(2, 32));
}

TEST_F(RetainedKv, WhatWasNotSavedAgainIsNotRetained) {
  make(kMuch);
  sleep_and_wake(saving({1, 2}, {5, 6}, 9));
  EXPECT_EQ(sleep_and_wake(saving({2}, {6}, 10)), Moved(0, 1));
  EXPECT_EQ(sleep_and_wake(saving({1, 2}, {5, 6}, 11)), Moved(1, 1));
}

TEST_F(RetainedKv, TheBudgetKeepsThoseWithAVersionFirst) {
  make(2 * kBytes);
  sleep_and_wake(saving({1, 2, 3, 4}, {0, 5, 6, 7}, 9));
  EXPECT_EQ(retained(), 2u);
  EXPECT_EQ(sleep_and_wake(saving({1, 2, 3, 4}, {0, 5, 6, 7}, 9)), Moved(2, 2));
  make(0);
  sleep_and_wake(saving({1, 2}, {5, 6}, 9));
  EXPECT_EQ(retained(), 0u);
  EXPECT_EQ(memory_->ledger().arena_held_bytes, 0u);
  EXPECT_EQ(sleep_and_wake(saving({1, 2}, {5, 6}, 9)), Moved(2, 0));
}

TEST_F(RetainedKv, WhateverWritesBlocksBesideTheEngineForgetsThem) {
  const orders::Save order = saving({1, 2}, {5, 0}, 9);
  const std::vector<std::pair<const char*, std::function<void()>>> writers{
      {"the owner says so", [&] { memory_->mark_dirty("kv_cache"); }},
      {"another layout", [&] { must(memory_->set_kv_layout("kv_cache", layout())); }},
      {"a sleep without the blocks", [&] { detach(), wake(); }},
      {"a wake that says that they are of no use", [&] { save(order), detach(), wake(/*keep=*/false); }},
      {"a checkpoint", [&] {
         orders::Restore load;
         load.checkpoint = {.directory = "/nonexistent"};
         EXPECT_FAILS(call_rank(*memory_, load), Code::kNotFound);
       }}};
  for (const auto& [what, happens] : writers) {
    SCOPED_TRACE(what);
    make(kMuch);
    sleep_and_wake(order);
    happens();
    EXPECT_EQ(retained(), 0u);
    EXPECT_EQ(sleep_and_wake(order), Moved(2, 0));
  }
}

TEST_F(RetainedKv, ASleepThatIsUndoneLeavesItsCopiesForTheNext) {
  make(kMuch);
  write(1, 11), write(2, 12);
  EXPECT_EQ(save(saving({1, 2}, {5, 0}, 9)), Moved(2, 0));
  call(orders::Undo{.what = orders::Undo::What::kSave, .tags = {"kv_cache"}});
  EXPECT_EQ(retained(), 2u);
  EXPECT_EQ(sleep_and_wake(saving({1, 2}, {5, 0}, 9)), Moved(0, 2));
  EXPECT_TRUE(holds(1, 11) && holds(2, 12));
}

TEST_F(RetainedKv, ASaveThatFailsLosesNothingOfThem) {
  auto owned = std::make_unique<FaultyDevice>(value_of(make_host_device()));
  FaultyDevice& device = *owned;
  memory_ =
      value_of(RankMemory::create(std::move(owned), linux_file_system(), {.threads = 1, .retain_kv_bytes = kMuch}));
  kv_ = value_of(memory_->allocate("kv_cache", "kv", kBlocks * kBytes));
  must(memory_->set_kv_layout("kv_cache", layout()));
  write(1, 11);
  sleep_and_wake(saving({1}, {5}, 9));
  write(2, 12);
  device.fail_at(1, /*sticky=*/true);
  EXPECT_FAILS(call_rank(*memory_, saving({1, 2}, {5, 6}, 10)), Code::kDevice);
  device.fail_at(0);
  EXPECT_EQ(retained(), 1u);
  EXPECT_EQ(sleep_and_wake(saving({1, 2}, {5, 6}, 10)), Moved(1, 1));
  EXPECT_TRUE(holds(1, 11) && holds(2, 12));
}

// They are the first to go where the arena needs room, however it is cut up.
TEST_F(RetainedKv, TheyMakeRoomForAnythingElse) {
  constexpr uint64_t kBudget = 24 * kPage;  // a block needs two
  make(kMuch, kBudget);
  write(1, 11), write(2, 12);
  const std::vector<int32_t> all{0, 1, 2, 3, 4, 5, 6, 7};
  const std::vector<uint64_t> versions{1, 2, 3, 4, 5, 6, 7, 8};
  sleep_and_wake(saving(all, versions, 9));
  EXPECT_EQ(retained(), 8u);
  {
    const HostArena::Span other = value_of(memory_->arena().allocate(10 * kPage));
    EXPECT_LT(retained(), 8u);
    EXPECT_GE(retained(), 1u);
  }
  EXPECT_GT(sleep_and_wake(saving(all, versions, 10)).second, 0u);
  EXPECT_TRUE(holds(1, 11) && holds(2, 12));
  EXPECT_EQ(retained(), 8u);
  ASSERT_SUCCEEDS(memory_->arena().prefault(kBudget));  // all that there may be
  EXPECT_EQ(retained(), 0u);
  sleep_and_wake(saving(all, versions, 11));
  // A sleep that needs all of it in one piece takes it.
  ASSERT_SUCCEEDS(memory_->allocate("weights", "w", kBudget - 2 * kPage));
  EXPECT_EQ(call(orders::Save{.tags = {"weights"}}).bytes, kBudget - 2 * kPage);
  EXPECT_EQ(retained(), 0u);
}

TEST_F(RetainedKv, AnOrderThatDoesNotSayTheVersionOfEachBlockIsRefused) {
  make(kMuch);
  EXPECT_FAILS(call_rank(*memory_, saving({1, 2}, {5}, 9)), Code::kCorruption, "version");
}

// --- an engine ---

// Its KV has other bytes in each step: whoever takes a block by its hash gets other tokens.
class SecondSleep : public SleepFailure {
 protected:
  static TestEngineOptions options(int ranks = 1) {
    return {.ranks = ranks, .num_blocks = 24, .retain_kv_bytes = kMiB, .mix_steps = true};
  }
  static uint64_t kv_bytes(int64_t blocks, int ranks) {
    return static_cast<uint64_t>(blocks * ranks) * kBlockBytes * kKvLayers;
  }
  static uint64_t whole_bytes(int ranks) { return (kWeightBytes + kRuntimeBytes) * static_cast<uint64_t>(ranks); }
};

TEST_F(SecondSleep, WithoutAStepItMovesNoKvAndAfterSomeOnlyTheTail) {
  for (const int ranks : {1, 2}) {
    for (int between = 0; between <= 9; between += 3) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, after " << between << " steps");
      SleepingEngine slept = make(options(ranks));
      begin(slept.engine);
      const SleepReport first = value_of(slept.controller.sleep(to_host()));
      EXPECT_EQ(first.reused_bytes, 0u);
      EXPECT_EQ(first.saved_bytes, whole_bytes(ranks) + kv_bytes(first.kept_blocks, ranks));
      ASSERT_SUCCEEDS(slept.controller.wake_up({}));
      for (int i = 0; i < between; ++i) slept.engine.step();
      const SleepReport second = value_of(slept.controller.sleep(to_host()));
      const uint64_t copied = second.saved_bytes - whole_bytes(ranks);
      EXPECT_EQ(copied + second.reused_bytes, kv_bytes(second.kept_blocks, ranks));
      // Of four requests each has one block that is being filled, and those that it filled meanwhile.
      if (between == 0) {
        EXPECT_EQ(copied, 0u);
      } else {
        EXPECT_GT(copied, 0u);
        EXPECT_LE(copied, kv_bytes(4 * (1 + (between + 3) / 4), ranks));
        EXPECT_GT(second.reused_bytes, 0u);
      }
      ASSERT_SUCCEEDS(slept.controller.wake_up({}));
      EXPECT_EQ(finish(slept.engine), uninterrupted(options(ranks)));
      EXPECT_EQ(slept.engine.recomputed(), 0);
    }
  }
}

// Blocks are freed, evicted and computed again meanwhile; some sleeps go to disk, some fail, some are only planned.
TEST_F(SecondSleep, I10HoweverOftenItSleepsEveryTokenIsTheSame) {
  const TestEngine::Tokens expected = uninterrupted(options());
  for (int every = 1; every <= 3; ++every) {
    SCOPED_TRACE(every);
    SleepingEngine slept = make(options());
    add_example_requests(slept.engine);
    uint64_t reused = 0;
    int turn = 0;
    const auto run = [&] {
      for (int i = 0; slept.engine.step(); ++i) {
        if (i % every != 0) continue;
        ++turn;
        if (turn % 5 == 1) slept.engine.fail_hook(turn % 2 == 0 ? "release_derived" : "rank detach");
        const Result<SleepReport> report = slept.controller.sleep(turn % 4 == 3 ? to_disk() : to_host());
        slept.engine.fail_hook("");
        if (!report) continue;
        reused += report->reused_bytes;
        ASSERT_SUCCEEDS(slept.controller.wake_up({}));
      }
    };
    run();
    add_late_request(slept.engine);
    run();
    EXPECT_EQ(slept.engine.tokens(), expected);
    EXPECT_GT(reused, 0u);
  }
}

TEST_F(SecondSleep, I7WhereverTheDeviceFailsItIsAllOrNothing) {
  const TestEngine::Tokens expected = uninterrupted(options());
  for (uint64_t n = 1;; n += test::next_failure()) {
    SCOPED_TRACE(n);
    SleepingEngine slept = make(options());
    begin(slept.engine);
    ASSERT_SUCCEEDS(slept.controller.sleep(to_host()));
    ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    slept.engine.step();
    slept.engine.device().fail_at(n);
    const Result<SleepReport> second = slept.controller.sleep(to_host());
    const bool fired = slept.engine.device().fired();
    slept.engine.device().fail_at(0);
    if (slept.controller.state().engine == "unrecoverable") continue;
    if (second) {
      ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    }
    const SleepReport third = value_of(slept.controller.sleep(to_host()));
    EXPECT_EQ(third.reused_bytes > 0, true);
    ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    EXPECT_EQ(finish(slept.engine), expected);
    if (!fired) break;
  }
}

TEST_F(SecondSleep, NewWeightsAndRequestsThatEndedLeaveNothingToReuse) {
  SleepingEngine slept = make(options());
  begin(slept.engine);
  ASSERT_SUCCEEDS(slept.controller.sleep(to_host()));
  ASSERT_SUCCEEDS(slept.controller.wake_up({.tags = {"weights"}}));
  slept.engine.load_weights(7);
  ASSERT_SUCCEEDS(slept.controller.wake_up({.old_kv = OldKv::kRecompute}));
  EXPECT_EQ(value_of(slept.controller.ledgers())[0].tags.at("kv_cache").backup_host_bytes, 0u);
  slept.engine.step();
  const SleepReport computed_again = value_of(slept.controller.sleep(to_host()));
  EXPECT_EQ(computed_again.reused_bytes, 0u);
  EXPECT_GT(computed_again.kept_blocks, 0);
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  ASSERT_SUCCEEDS(slept.controller.sleep({.in_flight = "abort"}));
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  EXPECT_EQ(value_of(slept.controller.ledgers())[0].tags.at("kv_cache").backup_host_bytes, 0u);
}

TEST_F(SecondSleep, OfACheckpointItHasNothing) {
  const std::string path = written_checkpoint(options());
  SleepingEngine slept = make(options());
  begin(slept.engine);
  ASSERT_SUCCEEDS(slept.controller.sleep(to_host()));
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  slept.engine.run();
  ASSERT_SUCCEEDS(slept.controller.wake_up({.from_checkpoint = path}));
  const SleepReport report = value_of(slept.controller.sleep(to_host()));
  EXPECT_EQ(report.reused_bytes, 0u);
}

}  // namespace
}  // namespace torpor
