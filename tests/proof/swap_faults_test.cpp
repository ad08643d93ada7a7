// SPDX-License-Identifier: Apache-2.0
// Whatever is thrown, wherever, in a swap of two engines with two ranks each (SleepController::swap): every allocation
// (every 5th, every 7th if not TORPOR_PROOF=long) fails in turn, once and for as long as the call lasts; every start of
// a thread; every hook of either engine throws in turn, before it has done its work and after. Then both are as before,
// or swapped, or `state_changed` says that something else is so: both asleep, or one of them lost and saying so.
// Nothing of an engine that is not lost is gone: every token is that of a run to which nothing happened.
#include <cstdlib>

#include "tests/proof/engine_scenarios.h"
#include "tests/proof/failing_calls.h"
#include "tests/support/results.h"

namespace torpor::proof::engine_faults {
namespace {

// Nothing of one engine is right in the other.
struct Pair {
  explicit Pair(size_t shape) : from{true, 1, Shape::of(shape)}, to{true, 2, Shape::of(shape)} {
    to.serve();
    EXPECT_SUCCEEDS(to.controller().sleep(kToHost));
    from.serve();
  }
  Status swap() {
    TORPOR_RETURN_IF_ERROR(SleepController::swap(from.controller(), to.controller()));
    return ok();
  }
  World from;  // serves
  World to;    // is asleep in the middle of its requests
};

// One trial; false: there was nothing left to fail.
template <class Arm, class Disarm>
bool attempt(size_t shape, Counts& counts, const Arm& arm, const Disarm& disarm) {
  Pair pair(shape);
  const Seen from_before(pair.from), to_before(pair.to);
  arm(pair);
  const Status done = pair.swap();
  const bool fired = disarm(pair);
  if (fired) ++counts.tried;
  const std::string from = pair.from.state(), to = pair.to.state();
  const auto go_on = [&] {
    for (World* const world : {&pair.from, &pair.to}) {
      if (world->state() == "unrecoverable") {
        EXPECT_FAILS(world->controller().wake_up({}), Code::kFailedPrecondition, "unrecoverable");
      } else {
        expect_the_same_tokens(*world);
      }
    }
    return fired;
  };
  if (done) {
    if (fired) ++counts.absorbed;
    EXPECT_EQ(from, "asleep");
    EXPECT_EQ(to, "awake");
    return go_on();
  }
  SCOPED_TRACE(done.error().to_string());
  EXPECT_TRUE(fired);
  if (from == "unrecoverable" || to == "unrecoverable") {
    ++counts.lost;
    EXPECT_TRUE(done.error().state_changed);
    EXPECT_TRUE(from == "unrecoverable" || from == "awake" || from == "asleep") << from;
    EXPECT_TRUE(to == "unrecoverable" || to == "asleep") << to;
    return go_on();
  }
  EXPECT_EQ(to, "asleep");
  if (from == "asleep") {
    ++counts.changed;
    EXPECT_TRUE(done.error().state_changed);
    return go_on();
  }
  ++counts.undone;
  EXPECT_FALSE(done.error().state_changed);
  EXPECT_TRUE(Seen(pair.from) == from_before);
  EXPECT_TRUE(Seen(pair.to) == to_before);
  EXPECT_FALSE(pair.from.machine->engine->frozen());
  EXPECT_SUCCEEDS(pair.swap());
  return go_on();
}

template <class Arm, class Disarm>
Counts fail_each(uint64_t stride, size_t shape, const Arm& arm, const Disarm& disarm) {
  Counts counts;
  for (uint64_t n = 1;; n += stride) {
    SCOPED_TRACE(testing::Message() << "occasion " << n);
    const bool fired = attempt(
        shape, counts, [&](Pair& pair) { arm(pair, n); }, disarm);
    if (!fired || testing::Test::HasFailure()) return counts;
  }
}

class SwapFaults : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    ::setenv("TORPOR_LOG", "off", 0);
    for (const uint64_t seed : {1, 2}) (void)uninterrupted(seed);
  }
};

TEST_F(SwapFaults, EveryAllocationFails) {
  for (const bool for_ever : {false, true}) {
    const Counts counts = fail_each(
        long_run() ? 1
        : for_ever ? 7
                   : 5,
        for_ever ? 0 : 3, [&](Pair&, uint64_t n) { allocations.arm(n, for_ever); },
        [](Pair&) { return allocations.disarm(); });
    print(for_ever ? "allocations of a swap failed from then on" : "allocations of a swap failed once", counts);
    EXPECT_GT(counts.undone, 0u);
    if (!for_ever) {
      EXPECT_EQ(counts.lost + counts.changed, 0u);
    }
  }
}

TEST_F(SwapFaults, EveryStartOfAThreadFails) {
  for (const bool for_ever : {false, true}) {
    const Counts counts = fail_each(
        1, for_ever ? 1 : 4, [&](Pair&, uint64_t n) { thread_starts.arm(n, for_ever); },
        [](Pair&) { return thread_starts.disarm(); });
    print("thread starts of a swap failed", counts);
    EXPECT_EQ(counts.lost + counts.changed, 0u);
    EXPECT_GE(counts.tried, 1u);
  }
}

TEST_F(SwapFaults, I11EveryHookThrows) {
  for (const bool for_ever : {false, true}) {
    Counts all;
    size_t shape = for_ever ? 2 : 0;
    for (World Pair::*const engine : {&Pair::from, &Pair::to}) {
      for (const bool after : {false, true}) {
        const auto hooks = [engine](Pair& pair) -> ThrowingHooks& { return (pair.*engine).machine->hooks; };
        const Counts counts = fail_each(
            1, shape++,
            [&](Pair& pair, uint64_t n) {
              hooks(pair).after = after;
              hooks(pair).fuse.arm(n, for_ever);
            },
            [&](Pair& pair) { return hooks(pair).fuse.disarm(); });
        all.add(counts);
      }
    }
    print(for_ever ? "hooks of a swap threw from then on" : "hooks of a swap threw once", all);
    EXPECT_GT(all.tried, 30u);
    EXPECT_GT(all.undone, 0u);
  }
}

}  // namespace
}  // namespace torpor::proof::engine_faults
