// SPDX-License-Identifier: Apache-2.0
// One engine falls asleep while another wakes on its memory (SleepController::swap): within the memory of one, and all
// or nothing.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <mutex>
#include <random>

#include <fmt/core.h>

#include "base/progress_file.h"
#include "engine/sleep_controller.h"
#include "tests/engine/sleep_failure.h"
#include "tests/engine/swap_engines.h"
#include "tests/support/sanitizers.h"

namespace torpor {
namespace {

using namespace test;

class SwapTest : public SleepFailure {
 protected:
  struct Pair {
    SleepingEngine from;  // serves
    SleepingEngine to;    // is asleep in the middle of its requests
    uint64_t peak = 0;    // of both, on any rank
    int watched = 1;      // ranks
    ~Pair() {
      for (int rank = 0; rank < watched; ++rank) {
        from.engine.device(rank).on_change({});
        to.engine.device(rank).on_change({});
      }
    }
  };
  std::unique_ptr<Pair> make_pair(const TestEngineOptions& from, const TestEngineOptions& to) {
    auto pair = std::unique_ptr<Pair>(new Pair{make(from), make(to)});
    begin(pair->to.engine, 4);
    value_of(pair->to.controller.sleep({.level = 2, .preserve_state = true}));
    begin(pair->from.engine);
    return pair;
  }
  std::unique_ptr<Pair> make_pair(int ranks = 1) { return make_pair(paged(1, ranks), paged(2, ranks)); }
  static void watch(Pair& pair, int ranks) {
    pair.watched = ranks;
    const auto peak = std::make_shared<std::mutex>();
    for (int rank = 0; rank < ranks; ++rank) {
      const auto look = [&pair, rank, peak] {
        const std::lock_guard lock(*peak);
        pair.peak = std::max(pair.peak, pair.from.engine.device(rank).info().physical_bytes +
                                            pair.to.engine.device(rank).info().physical_bytes);
      };
      pair.from.engine.device(rank).on_change(look);
      pair.to.engine.device(rank).on_change(look);
    }
  }
  static Result<SwapReport> swap(Pair& pair, const SwapOptions& options = {}) {
    return SleepController::swap(pair.from.controller, pair.to.controller, options);
  }
  static void expect_as_before(Pair& pair) {
    EXPECT_EQ(pair.from.controller.state().engine, "awake");
    EXPECT_FALSE(pair.from.engine.frozen());
    EXPECT_EQ(pair.to.controller.state().engine, "asleep");
    EXPECT_EQ(pair.to.engine.device().info().physical_bytes, 0u);
  }
  // Whatever happened before: both go on to their ends, one after the other.
  static void expect_same_tokens(Pair& pair, int ranks = 1) {
    if (pair.from.controller.is_sleeping()) {
      ASSERT_SUCCEEDS(pair.from.controller.wake_up({}));
    }
    EXPECT_EQ(finish(pair.from.engine), expected(1, ranks));
    if (pair.to.controller.is_sleeping()) {
      ASSERT_SUCCEEDS(pair.to.controller.wake_up({}));
    }
    EXPECT_EQ(finish(pair.to.engine), expected(2, ranks));
    EXPECT_EQ(pair.from.engine.recomputed() + pair.to.engine.recomputed(), 0);
  }
  static const TestEngine::Tokens& expected(uint64_t seed, int ranks) {
    static std::map<std::pair<uint64_t, int>, TestEngine::Tokens> known;
    const auto [entry, fresh] = known.try_emplace({seed, ranks});
    if (fresh) entry->second = uninterrupted(paged(seed, ranks));
    return entry->second;
  }
};

TEST_F(SwapTest, EnginesTakeTurnsWithinTheMemoryOfOne) {
  for (const int ranks : {1, 2}) {
    for (const bool defer_copies : {false, true}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks, copies " << (defer_copies ? "late" : "at once"));
      const auto pair = make_pair(paged(1, ranks, defer_copies), paged(2, ranks, defer_copies));
      const uint64_t one = pair->from.engine.device().info().physical_bytes;
      ASSERT_GT(one, 8 * kSwapPageBytes);
      watch(*pair, ranks);
      SleepingEngine* awake = &pair->from;
      SleepingEngine* asleep = &pair->to;
      for (int turn = 0; turn < 6; ++turn) {
        const SwapReport report = value_of(SleepController::swap(awake->controller, asleep->controller));
        std::swap(awake, asleep);
        EXPECT_TRUE(report.woken.fully_awake);
        EXPECT_TRUE(report.slept.preserve_state);
        EXPECT_EQ(report.slept.freed_bytes, one * static_cast<uint64_t>(ranks));
        EXPECT_GT(report.slept.saved_bytes, kWeightBytes);
        EXPECT_GT(report.woken.restored_bytes, kWeightBytes);
        EXPECT_EQ(awake->controller.state().engine, "awake");
        EXPECT_EQ(asleep->controller.state().engine, "asleep");
        EXPECT_EQ(asleep->engine.device().info().physical_bytes, 0u);
        EXPECT_TRUE(asleep->engine.frozen());
        for (int step = 0; step < 2; ++step) EXPECT_TRUE(awake->engine.step());
      }
      EXPECT_EQ(pair->peak, one) << "both together had more than one of them";
      expect_same_tokens(*pair, ranks);
    }
  }
}

// The one that goes stops after its first pages until the other one has taken some.
TEST_F(SwapTest, MemoryIsTakenWhileTheRestIsStillThere) {
  const auto pair = make_pair();
  std::promise<void> taken;
  std::atomic<bool> waits = true;
  uint64_t left = 0;
  pair->to.engine.device().on_change([&] {
    if (!waits.exchange(false)) return;
    left = pair->from.engine.device().info().physical_bytes;
    taken.set_value();
  });
  pair->from.engine.device().on_change([&, gone = 0]() mutable {
    if (++gone != 2) return;  // the first was told
    EXPECT_EQ(taken.get_future().wait_for(std::chrono::minutes(2)), std::future_status::ready);
  });
  ASSERT_SUCCEEDS(swap(*pair));
  EXPECT_GT(left, 0u);
  expect_same_tokens(*pair);
}

TEST_F(SwapTest, ALargerEngineTakesWhatThereIsMore) {
  TestEngineOptions large = paged(2);
  large.num_blocks = 6000;
  for (const bool grows : {true, false}) {
    SCOPED_TRACE(grows ? "the larger one comes" : "the larger one goes");
    const auto pair = grows ? make_pair(paged(1), large) : make_pair(large, paged(1));
    ASSERT_SUCCEEDS(swap(*pair));
    EXPECT_EQ(finish(pair->to.engine), uninterrupted(grows ? large : paged(1)));
    ASSERT_SUCCEEDS(pair->to.controller.sleep(to_host()));
    ASSERT_SUCCEEDS(pair->from.controller.wake_up({}));
    EXPECT_EQ(finish(pair->from.engine), uninterrupted(grows ? paged(1) : large));
  }
}

TEST_F(SwapTest, WhereverAHookFailsBothAreAsBefore) {
  const auto check = [&](const char* hook, bool of_from, bool always) {
    SCOPED_TRACE(testing::Message() << hook << (of_from ? " of the one that goes" : " of the one that comes")
                                    << (always ? ", always" : ""));
    const auto pair = make_pair();
    TestEngine& failing = of_from ? pair->from.engine : pair->to.engine;
    failing.fail_hook(hook, always);
    const Result<SwapReport> swapped = swap(*pair);
    failing.fail_hook("");
    EXPECT_FAILS(swapped, Code::kInternal, hook);
    EXPECT_FALSE(swapped.error().state_changed) << swapped.error().to_string();
    expect_as_before(*pair);
    ASSERT_SUCCEEDS(swap(*pair));
    expect_same_tokens(*pair);
  };
  for (const char* hook : {"unsupported", "unfinished_requests", "quiesce", "capture", "release_derived",
                           "rank describe", "rank save", "rank detach"})
    check(hook, true, false);
  for (const char* hook :
       {"unfinished_requests", "rank restore", "rank describe", "rebuild_derived", "reconnect", "rank finish"}) {
    check(hook, false, false);
    if (hook != std::string_view("rank finish")) check(hook, false, true);
  }
}

TEST_F(SwapTest, WhereverADeviceFailsBothAreAsBefore) {
  for (const int ranks : {1, 2}) {
    for (const bool of_from : {true, false}) {
      uint64_t undone = 0;
      for (uint64_t n = 1;; n += test::next_failure()) {
        SCOPED_TRACE(testing::Message() << ranks << " ranks, call " << n << (of_from ? " of the one that goes" : ""));
        ASSERT_LT(n, 400u);
        const auto pair = make_pair(ranks);
        FaultyDevice& device = (of_from ? pair->from : pair->to).engine.device(ranks - 1);
        device.fail_at(n);
        const Result<SwapReport> swapped = swap(*pair);
        const bool fired = device.fired();
        device.fail_at(0);
        if (!swapped) {
          ++undone;
          EXPECT_FALSE(swapped.error().state_changed) << swapped.error().to_string();
          expect_as_before(*pair);
          ASSERT_SUCCEEDS(swap(*pair));
        }
        EXPECT_EQ(pair->from.controller.state().engine, "asleep");
        expect_same_tokens(*pair, ranks);
        if (!fired) break;
      }
      EXPECT_GT(undone, 10u / test::next_failure());
    }
  }
}

TEST_F(SwapTest, WhatCannotBeUndoneIsSaidAndTheOtherEngineIsWhole) {
  bool lost = false;
  for (uint64_t n = 1;; n += test::next_failure()) {
    SCOPED_TRACE(n);
    ASSERT_LT(n, 400u);
    const auto pair = make_pair();
    FaultyDevice& device = pair->from.engine.device();
    device.fail_at(n, /*sticky=*/true);
    const Result<SwapReport> swapped = swap(*pair);
    const bool fired = device.fired();
    device.fail_at(0);
    const std::string state = pair->from.controller.state().engine;
    if (!swapped) {
      EXPECT_EQ(swapped.error().state_changed, state != "awake") << swapped.error().to_string();
      EXPECT_EQ(pair->to.controller.state().engine, "asleep");
    }
    if (state == "unrecoverable") {
      lost = true;
      ASSERT_SUCCEEDS(pair->to.controller.wake_up({}));
      EXPECT_EQ(finish(pair->to.engine), expected(2, 1));
    } else {
      expect_same_tokens(*pair);
    }
    if (!fired) break;
  }
  EXPECT_TRUE(lost);
}

TEST_F(SwapTest, ACopyThatIsNotProvenOverKeepsItsMemory) {
  // A rank keeps what such a copy may use until the process ends; here somebody can still name it.
  static auto* const kept = new std::vector<std::unique_ptr<Pair>>;
  const auto& pair = kept->emplace_back(make_pair());
  pair->from.engine.device().drain_as(Drain::kUnproven);
  const Result<SwapReport> swapped = swap(*pair);
  EXPECT_FAILS(swapped, Code::kDevice, "swap");
  EXPECT_EQ(pair->to.controller.state().engine, "asleep");
  ASSERT_SUCCEEDS(pair->to.controller.wake_up({}));
  EXPECT_EQ(finish(pair->to.engine), expected(2, 1));
}

// Its bytes are nowhere any more: it must not go on.
TEST_F(SwapTest, ACopyThatIsNotProvenOverAfterMemoryWentLosesTheEngine) {
  static auto* const kept = new std::vector<std::unique_ptr<Pair>>;
  const auto& pair = kept->emplace_back(make_pair());
  pair->from.engine.device().on_change([&] { pair->from.engine.device().drain_as(Drain::kUnproven); });
  const Result<SwapReport> swapped = swap(*pair);
  EXPECT_FAILS(swapped, Code::kDevice, "swap");
  EXPECT_EQ(pair->from.controller.state().engine, "unrecoverable");
  EXPECT_EQ(pair->to.controller.state().engine, "asleep");
  ASSERT_SUCCEEDS(pair->to.controller.wake_up({}));
  EXPECT_EQ(finish(pair->to.engine), expected(2, 1));
}

TEST_F(SwapTest, WithoutRoomInHostMemoryNothingGoes) {
  TestEngineOptions options = paged(1);
  options.arena_budget_bytes = room_for_weights_only();
  const auto pair = make_pair(options, paged(2));
  pair->from.engine.device().on_change([] { ADD_FAILURE() << "memory went, or came"; });
  EXPECT_FAILS(swap(*pair), Code::kResourceExhausted,
               fmt::format("more wanted, 0 of the budget of {} are held", room_for_weights_only()));
  pair->from.engine.device().on_change({});
  expect_as_before(*pair);
  expect_same_tokens(*pair);
}

TEST_F(SwapTest, WithoutDeviceMemoryTheOneThatGoesIsAwakeAgain) {
  TestEngineOptions small = paged(2);
  small.device_capacity_bytes = 20 * kSwapPageBytes;
  const auto pair = make_pair(paged(1), small);
  const PhysicalId other = value_of(pair->to.engine.device().create(15 * kSwapPageBytes));
  EXPECT_FAILS(swap(*pair), Code::kResourceExhausted, "swap");
  EXPECT_EQ(pair->from.controller.state().engine, "awake");
  ASSERT_SUCCEEDS(pair->to.engine.device().release(other));
  expect_as_before(*pair);
  ASSERT_SUCCEEDS(swap(*pair));
  expect_same_tokens(*pair);
}

// What the device has not got yet comes as long as the other engine gives.
TEST_F(SwapTest, DeviceMemoryThatIsSlowToComeIsWaitedFor) {
  TestEngineOptions small = paged(2);
  small.device_capacity_bytes = 20 * kSwapPageBytes;
  const auto pair = make_pair(paged(1), small);
  const PhysicalId other = value_of(pair->to.engine.device().create(15 * kSwapPageBytes));
  const uint64_t all = pair->from.engine.device().info().physical_bytes;
  pair->from.engine.device().on_change([&, given = uint64_t{0}, done = false]() mutable {
    given += kSwapPageBytes;
    if (done || given + kSwapPageBytes < all) return;
    done = true;
    EXPECT_SUCCEEDS(pair->to.engine.device().release(other));
  });
  ASSERT_SUCCEEDS(swap(*pair));
  expect_same_tokens(*pair);
}

TEST_F(SwapTest, WhereTheFirstCannotBeWokenAgainBothAreAsleepAndNothingIsLost) {
  const auto pair = make_pair();
  pair->to.engine.before_hook = [&](const std::string& hook) {
    if (hook == "reconnect") pair->from.engine.device().fail_at(1, /*sticky=*/true);
  };
  pair->to.engine.fail_hook("reconnect");
  const Result<SwapReport> swapped = swap(*pair);
  EXPECT_FAILS(swapped, Code::kInternal, "the engine that went stays asleep");
  EXPECT_TRUE(swapped.error().state_changed);
  pair->from.engine.device().fail_at(0);
  pair->to.engine.before_hook = nullptr;
  EXPECT_EQ(pair->from.controller.state().engine, "asleep");
  EXPECT_EQ(pair->to.controller.state().engine, "asleep");
  expect_same_tokens(*pair);
}

TEST_F(SwapTest, WhatCannotBeSwappedIsRefusedByNameAndNothingIsTouched) {
  const auto pair = make_pair();
  EXPECT_FAILS(SleepController::swap(pair->from.controller, pair->from.controller), Code::kInvalidArgument,
               "one engine");
  EXPECT_FAILS(SleepController::swap(pair->to.controller, pair->from.controller), Code::kFailedPrecondition,
               "that is to go is asleep");
  pair->from.engine.unsupported_features = {"LoRA"};
  EXPECT_FAILS(swap(*pair), Code::kUnsupported, "LoRA");
  pair->from.engine.unsupported_features.clear();
  expect_as_before(*pair);
  ASSERT_SUCCEEDS(pair->to.controller.wake_up({}));
  EXPECT_FAILS(swap(*pair), Code::kFailedPrecondition, "that is to come is awake");
  ASSERT_SUCCEEDS(pair->to.controller.sleep({.level = 0}));
  EXPECT_FAILS(swap(*pair), Code::kFailedPrecondition, "only paused");
  ASSERT_SUCCEEDS(pair->to.controller.sleep({.preserve_state = true, .weights = Weights::kReload}));
  EXPECT_FAILS(swap(*pair), Code::kFailedPrecondition, "has not kept its weights");
  EXPECT_EQ(finish(pair->from.engine), expected(1, 1));
}

TEST_F(SwapTest, EnginesOfOtherRanksAreRefused) {
  const auto pair = make_pair(paged(1), paged(2, 2));
  EXPECT_FAILS(swap(*pair), Code::kFailedPrecondition, "ranks");
  expect_as_before(*pair);
  EXPECT_EQ(finish(pair->from.engine), expected(1, 1));
}

// Which engine runs for how long, which goes, and which device fails at which call, once or for good, is drawn by seed.
TEST_F(SwapTest, RandomSwapsLoseNoToken) {
  uint64_t swaps = 0;
  uint64_t undone = 0;
  for (uint64_t seed = 0; seed < 15; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const auto below = [&](uint64_t limit) { return random() % limit; };
    const int ranks = 1 + static_cast<int>(below(2));
    TestEngineOptions from = paged(1, ranks, below(2) == 0);
    TestEngineOptions to = paged(2, ranks, below(2) == 0);
    from.own_threads = to.own_threads = below(2) == 0;
    from.exchange_asleep = to.exchange_asleep = true;
    if (below(2) == 0) from.retain_kv_bytes = to.retain_kv_bytes = 4096;
    if (seed % 2 == 0) from.host_compression = Codec::kBf16;
    if (seed % 3 == 0) to.host_compression = Codec::kBf16;
    const auto pair = make_pair(from, to);
    SleepingEngine* awake = &pair->from;
    SleepingEngine* asleep = &pair->to;
    for (int turn = 0; turn < 8; ++turn) {
      for (uint64_t steps = below(3); steps > 0; --steps) awake->engine.step();
      FaultyDevice& device =
          (below(2) == 0 ? awake : asleep)->engine.device(static_cast<int>(below(static_cast<uint64_t>(ranks))));
      if (below(2) == 0) device.fail_at(1 + below(60));
      const Result<SwapReport> swapped = SleepController::swap(awake->controller, asleep->controller);
      const bool fired = device.fired();
      device.fail_at(0);
      if (swapped) {
        ++swaps;
        std::swap(awake, asleep);
      } else {
        ++undone;
        EXPECT_TRUE(fired) << swapped.error().to_string();
      }
      ASSERT_EQ(awake->controller.state().engine, "awake");
      ASSERT_EQ(asleep->controller.state().engine, "asleep");
    }
    expect_same_tokens(*pair, ranks);
  }
  EXPECT_GT(swaps, 30u);
  EXPECT_GT(undone, 5u);
}

TEST_F(SwapTest, WhoWatchesCancelsIt) {
  const auto pair = make_pair();
  const std::string path = temporary_ / "progress";
  const auto watcher = value_of(ProgressFile::create(path));
  pair->from.engine.device().on_change([&] { watcher->cancel(); });  // when the first page went
  const Result<SwapReport> swapped = swap(*pair, {.progress = path});
  pair->from.engine.device().on_change({});
  EXPECT_FAILS(swapped, Code::kAborted, "cancelled");
  expect_as_before(*pair);
  ASSERT_SUCCEEDS(swap(*pair));
  expect_same_tokens(*pair);
}

}  // namespace
}  // namespace torpor
