// SPDX-License-Identifier: Apache-2.0
// Whatever is thrown, wherever, in a sleep, a wake or a checkpoint, those behind a serving engine too: every allocation
// fails in turn, once and for as long as the call lasts; every start of a thread fails in turn; every hook throws in
// turn, before it has done its work and after. The engine (two ranks, to host and to disk) is then awake and unchanged,
// or asleep, or lost and says so; `state_changed` is what happened; a retry works, and every token is that of a run to
// which nothing happened.
#include <cstdlib>

#include "engine/tag_sleep.h"
#include "tests/proof/engine_scenarios.h"
#include "tests/proof/failing_calls.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor::proof::engine_faults {
namespace {

// One trial; false: there was nothing left to fail.
template <class Arm, class Disarm>
void attempt(const Scenario& scenario, bool own_threads, const Shape& shape, Counts& counts, bool& fired,
             const Arm& arm, const Disarm& disarm) {
  World world(own_threads, 1, shape);
  scenario.prepare(world);
  if (testing::Test::HasFatalFailure()) return;
  const std::string directory = world.temporary / "store";
  const Arguments with(directory);
  const Seen before(world);
  arm(world);
  const Status done = scenario.work(world.controller(), with);
  fired = disarm(world);
  if (fired) ++counts.tried;
  const Seen after(world);
  if (done) {
    if (fired) ++counts.absorbed;
    ASSERT_NE(after.state, "unrecoverable");
    return expect_the_same_tokens(world);
  }
  SCOPED_TRACE(done.error().to_string());
  ASSERT_TRUE(fired);
  if (after.state == "unrecoverable") {
    ++counts.lost;
    ASSERT_TRUE(done.error().state_changed);
    EXPECT_FAILS(world.controller().wake_up({}), Code::kFailedPrecondition, "unrecoverable");
    EXPECT_FAILS(world.controller().sleep(kToHost), Code::kFailedPrecondition, "unrecoverable");
    if (after.checkpoints.empty()) return;
    // What is on disk goes on in a new engine. It was not gone on with, so it is not marked.
    ASSERT_EQ(after.checkpoints.back().find("woken"), std::string::npos);
    world.restart();
    ASSERT_SUCCEEDS(world.controller().wake_up({.from_checkpoint = directory}));
    return expect_the_same_tokens(world);
  }
  ASSERT_EQ(after.state, before.state);
  ++(done.error().state_changed ? counts.changed : counts.undone);
  const bool changed = !(after == before);
  // Where a hook that cannot be undone failed, only it knows how far it came.
  const bool perhaps = done.error().what.find("; its requests may be ") != std::string::npos;
  ASSERT_TRUE(done.error().state_changed == changed || (perhaps && done.error().state_changed))
      << "changed: " << changed << ", checkpoints " << testing::PrintToString(after.checkpoints);
  ASSERT_EQ(world.machine->engine->frozen(), after.state != "awake");
  ASSERT_SUCCEEDS(scenario.work(world.controller(), with));
  expect_the_same_tokens(world);
}

// Every n-th occasion of every scenario, until none is left. What is done behind the engine has threads of its own only
// where it is told to: how often who asks for it looks differs from run to run. The memory of each scenario has another
// shape, counted from `shapes_from`.
enum class Behind : uint8_t { kInOneOrder, kWithThreads };
template <class Arm, class Disarm>
Counts fail_each(uint64_t stride, size_t shapes_from, Behind how, const Arm& arm, const Disarm& disarm) {
  Counts counts;
  for (const Scenario& scenario : scenarios()) {
    const Shape shape = Shape::of(shapes_from++);
    const bool own_threads = !scenario.behind || how == Behind::kWithThreads;
    const uint64_t step = scenario.behind && stride > 1 ? 3 * stride : stride;
    SCOPED_TRACE(scenario.name);
    for (uint64_t n = 1;; n += step) {
      SCOPED_TRACE(testing::Message() << "occasion " << n);
      bool fired = false;
      attempt(
          scenario, own_threads, shape, counts, fired, [&](World& world) { arm(world, n); }, disarm);
      if (testing::Test::HasFatalFailure()) return counts;
      if (!fired) break;
    }
  }
  return counts;
}

class EngineFaults : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    ::setenv("TORPOR_LOG", "off", 0);
    (void)uninterrupted();
  }
};

TEST_F(EngineFaults, EveryAllocationFails) {
  for (const bool for_ever : {false, true}) {
    const Counts counts = fail_each(
        long_run() ? 1
        : for_ever ? 31
                   : 11,
        for_ever ? 1 : 0, Behind::kInOneOrder, [&](World&, uint64_t n) { allocations.arm(n, for_ever); },
        [](World&) { return allocations.disarm(); });
    print(for_ever ? "allocations failed from then on" : "allocations failed once", counts);
    if (!for_ever) {
      EXPECT_EQ(counts.lost, 0u);
      EXPECT_GT(counts.tried, 1000u);
    }
  }
}

TEST_F(EngineFaults, EveryStartOfAThreadFails) {
  for (const bool for_ever : {false, true}) {
    const Counts counts = fail_each(
        1, for_ever ? 3 : 2, Behind::kWithThreads, [&](World&, uint64_t n) { thread_starts.arm(n, for_ever); },
        [](World&) { return thread_starts.disarm(); });
    print(for_ever ? "thread starts failed from then on" : "thread starts failed once", counts);
    EXPECT_EQ(counts.lost, 0u);
    EXPECT_GE(counts.tried, 4u);  // few are started in an operation
  }
}

// Those of an engine's lanes and streams.
TEST_F(EngineFaults, EveryStartOfAThreadFailsWhenAnEngineIsMade) {
  uint64_t tried = 0;
  for (const bool for_ever : {false, true}) {
    for (uint64_t n = 1;; ++n) {
      SCOPED_TRACE(testing::Message() << "start " << n << (for_ever ? " and all after" : ""));
      std::vector<std::unique_ptr<DeviceMemory>> devices;
      for (size_t rank = 0; rank < kRanks; ++rank) devices.push_back(test::value_of(make_host_device()));
      thread_starts.arm(n, for_ever);
      auto engine = ReferenceEngine::create(std::move(devices), linux_file_system(), system_clock(), {});
      if (!thread_starts.disarm()) {
        ASSERT_SUCCEEDS(engine);
        break;
      }
      ++tried;
      EXPECT_FAILS(engine, Code::kResourceExhausted, "thread");
    }
  }
  std::printf("proof: %lu thread starts failed while an engine was made: an error each\n",
              static_cast<unsigned long>(tried));
  EXPECT_GE(tried, 2 * kRanks * 2);
}

TEST_F(EngineFaults, I11EveryHookThrows) {
  for (const bool for_ever : {false, true}) {
    Counts all;
    size_t shapes_from = for_ever ? 3 : 0;
    for (const bool after : {false, true}) {
      for (const Thrown thrown : {Thrown::kRuntimeError, Thrown::kBadAlloc, Thrown::kNumber}) {
        const Counts counts = fail_each(
            1, shapes_from++, Behind::kInOneOrder,
            [&](World& world, uint64_t n) {
              ThrowingHooks& hooks = world.machine->hooks;
              hooks.thrown = thrown;
              hooks.after = after;
              hooks.fuse.arm(n, for_ever);
            },
            [](World& world) { return world.machine->hooks.fuse.disarm(); });
        if (HasFatalFailure()) return;
        all.add(counts);
      }
    }
    print(for_ever ? "hooks threw from then on" : "hooks threw once", all);
    EXPECT_GT(all.tried, 300u);
  }
}

// The same of tags without a controller (tag_sleep.h).
TEST_F(EngineFaults, EveryAllocationFailsInTheMemoryOfTags) {
  constexpr uint64_t kSize = 64 * 1024;
  Counts counts;
  for (const bool waking : {false, true}) {
    for (const bool for_ever : {false, true}) {
      for (uint64_t n = 1;; ++n) {
        SCOPED_TRACE(testing::Message() << (waking ? "wake" : "sleep") << ", allocation " << n
                                        << (for_ever ? " and all after" : ""));
        const auto memory = test::value_of(RankMemory::create(test::value_of(make_host_device()), linux_file_system(),
                                                              {.arena_slab_bytes = 64 << 10, .threads = 1}));
        const std::vector<std::string> kept{"kept"};
        const DeviceAddress address = test::value_of(memory->allocate("kept", "x", kSize));
        for (const char* tag : {"kept", "other"}) test::value_of(memory->allocate(tag, "y", kSize));
        auto* const bytes = reinterpret_cast<unsigned char*>(address);  // NOLINT(performance-no-int-to-ptr)
        for (uint64_t i = 0; i < kSize; ++i) bytes[i] = static_cast<unsigned char>(i * 7);
        if (waking) {
          ASSERT_SUCCEEDS(TagSleep(*memory).sleep({}, kept));
        }
        allocations.arm(n, for_ever);
        Result<TagMove> moved = waking ? TagSleep(*memory).wake({}) : TagSleep(*memory).sleep({}, kept);
        const bool fired = allocations.disarm();
        for (const auto& [tag, state] : memory->states()) {
          ASSERT_EQ(is_asleep(state), waking == !moved) << tag << " is " << name(state);
          ASSERT_TRUE(is_asleep(state) || state == RegionState::kAttached) << tag << " is " << name(state);
        }
        if (!moved) {
          ASSERT_TRUE(fired);
          ASSERT_FALSE(moved.error().state_changed);
          ++counts.undone;
          moved = waking ? TagSleep(*memory).wake({}) : TagSleep(*memory).sleep({}, kept);
          ASSERT_SUCCEEDS(moved);
        } else if (fired) {
          ++counts.absorbed;
        }
        if (!waking) {
          ASSERT_SUCCEEDS(TagSleep(*memory).wake({}));
        }
        for (uint64_t i = 0; i < kSize; ++i) ASSERT_EQ(bytes[i], static_cast<unsigned char>(i * 7)) << i;
        if (!fired) break;
        ++counts.tried;
      }
    }
  }
  print("allocations failed in the memory of tags", counts);
  EXPECT_GT(counts.undone, 100u);
}

}  // namespace
}  // namespace torpor::proof::engine_faults
