// SPDX-License-Identifier: Apache-2.0
// The two halves of a swap in two processes, in one of which anything goes wrong (SleepOptions::swap_out_to,
// WakeOptions::swap_in_from): every allocation fails in turn, once and for as long as the call lasts; every hook
// throws; the process is killed at an allocation, or stopped there until the other half has given it up. A half starts
// no thread. Then both have swapped, or both are as before and swap at the next call, or the half whose calls failed is
// lost or asleep and says so. The other half ends and names why. Every token is that of a run to which nothing
// happened.
//
// TORPOR_PROOF=long tries each place; otherwise some, in seconds.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>

#include "base/swap_channel.h"
#include "tests/proof/engine_scenarios.h"
#include "tests/proof/failing_calls.h"
#include "tests/support/results.h"
#include "tests/support/shared_event.h"
#include "tests/support/temporary_directory.h"

namespace torpor::proof::engine_faults {
namespace {

using namespace std::chrono_literals;
using Side = SwapChannel::Side;

constexpr SwapChannel::Seconds kNoTimeout = 10min;
constexpr SwapChannel::Seconds kPeerTimeout = 500ms;  // where one is stopped: more than who runs waits for a core

enum class Ends : uint8_t { kNothing, kSwapped, kAsBefore, kAsleep, kLost };
constexpr std::array<const char*, 5> kEnds{"nothing", "swapped", "as before", "asleep", "unrecoverable"};

// What the processes of one trial see.
struct Shared {
  struct Half {
    std::atomic<Ends> ends;
    std::atomic<bool> fired;
    test::SharedEvent over;  // it has come to its end, or its process has
    std::array<char, 500> error;
  };
  std::array<Half, 2> halves;
};

class Trial {
 public:
  using Arm = std::function<void(World&)>;
  using Disarm = std::function<bool(World&)>;  // whether it has fired

  Trial(Side failing, SwapChannel::Seconds peer_timeout) : failing_(failing) {
    for (size_t turn = 0; turn < rooms_.size(); ++turn)
      rooms_[turn] = test::value_of(SwapChannel::create(path(turn), turn == 0 ? peer_timeout : kNoTimeout));
  }
  ~Trial() { (void)::munmap(shared_, sizeof(Shared)); }

  // False: there was nothing left to fail.
  bool run(Counts& counts, const Arm& arm, const Disarm& disarm, int signal = 0) {
    const std::array<pid_t, 2> children{fork(Side::kSwapsOut, arm, disarm), fork(Side::kSwapsIn, arm, disarm)};
    const size_t failing = failing_ == Side::kSwapsOut ? 0 : 1;
    std::array<bool, 2> left{true, true};
    while (left[0] || left[1]) {
      int status = 0;
      const pid_t child = ::waitpid(-1, &status, WUNTRACED);
      const size_t which = child == children[0] ? 0 : 1;
      if (WIFSTOPPED(status)) {
        go_on_when_the_other_has_ended(children[which], which);
        continue;
      }
      left[which] = false;
      half(which).over.set();
      const Side side = which == 0 ? Side::kSwapsOut : Side::kSwapsIn;
      if (!rooms_[0]->has_joined(side)) (void)rooms_[0]->stop(side);  // as whoever asked for it does
      const bool killed = which == failing && signal == SIGKILL && WIFSIGNALED(status);
      killed_ |= killed;
      EXPECT_TRUE(killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) << name(which) << ": status " << status;
    }
    judge(counts);
    return half(failing).fired || killed_;
  }

 private:
  static const char* name(size_t which) { return which == 0 ? "the one that goes" : "the one that comes"; }
  Shared::Half& half(size_t which) { return shared_->halves[which]; }
  std::string path(size_t turn) const { return temporary_ / ("room-" + std::to_string(turn)); }

  void go_on_when_the_other_has_ended(pid_t stopped, size_t which) {
    EXPECT_TRUE(half(1 - which).over.wait(60s)) << name(1 - which) << " waits for one that is stopped";
    half(which).fired = true;
    (void)::kill(stopped, SIGCONT);
  }

  pid_t fork(Side side, const Arm& arm, const Disarm& disarm) {
    (void)std::fflush(nullptr);
    const pid_t child = ::fork();
    if (child != 0) return child;
    live(side, arm, disarm);
    (void)std::fflush(nullptr);
    ::_exit(testing::Test::HasFailure() ? 1 : 0);
  }

  void live(Side side, const Arm& arm, const Disarm& disarm) {
    const bool gives = side == Side::kSwapsOut;
    Shared::Half& own = half(gives ? 0 : 1);
    Shared::Half& other = half(gives ? 1 : 0);
    World world{true, gives ? 1U : 2U};
    world.serve();
    if (!gives) {
      EXPECT_SUCCEEDS(world.controller().sleep(kToHost));
    }
    const Seen before(world);
    const std::array<SleepOptions, 2> sleeps{SleepOptions{.preserve_state = true, .swap_out_to = path(0)},
                                             SleepOptions{.preserve_state = true, .swap_out_to = path(1)}};
    const std::array<WakeOptions, 2> wakes{WakeOptions{.swap_in_from = path(0)}, WakeOptions{.swap_in_from = path(1)}};
    const auto swap = [&](size_t turn) {
      return status_of(gives ? world.controller().sleep(sleeps[turn]) : world.controller().wake_up(wakes[turn]));
    };
    if (side == failing_) arm(world);
    const Status done = swap(0);
    if (side == failing_) own.fired = disarm(world);
    if (!done) {
      (void)test::value_of(SwapChannel::open(path(0)))->stop(side);  // as whoever asked for it does
      (void)std::snprintf(own.error.data(), own.error.size(), "%s", done.error().to_string().c_str());
    }
    SCOPED_TRACE(testing::Message() << name(gives ? 0 : 1) << ": " << own.error.data());
    own.ends = how_it_ended(world, gives, done, before);
    own.over.set();
    EXPECT_TRUE(other.over.wait(600s));
    if (own.ends == Ends::kAsBefore && other.ends == Ends::kAsBefore) {
      EXPECT_SUCCEEDS(swap(1));
    }
    if (own.ends != Ends::kLost) return expect_the_same_tokens(world);
    EXPECT_FAILS(world.controller().wake_up({}), Code::kFailedPrecondition, "unrecoverable");
  }

  static Ends how_it_ended(World& world, bool gives, const Status& done, const Seen& before) {
    const std::string state = world.state();
    if (done) {
      EXPECT_EQ(state, gives ? "asleep" : "awake");
      return Ends::kSwapped;
    }
    if (state == "unrecoverable" || (gives && state == "asleep")) {
      EXPECT_TRUE(done.error().state_changed);
      return state == "unrecoverable" ? Ends::kLost : Ends::kAsleep;
    }
    EXPECT_FALSE(done.error().state_changed);
    EXPECT_EQ(state, gives ? "awake" : "asleep");
    EXPECT_TRUE(Seen(world) == before);
    EXPECT_EQ(world.machine->engine->frozen(), !gives);
    return Ends::kAsBefore;
  }

  void judge(Counts& counts) {
    const size_t failing = failing_ == Side::kSwapsOut ? 0 : 1;
    const Ends gives = half(0).ends;
    const Ends takes = half(1).ends;
    if (!half(failing).fired && !killed_) {
      EXPECT_TRUE(gives == Ends::kSwapped && takes == Ends::kSwapped) << half(0).error.data() << half(1).error.data();
      return;
    }
    ++counts.tried;
    const std::string both = std::string(kEnds[static_cast<size_t>(gives)]) + ", " + kEnds[static_cast<size_t>(takes)];
    SCOPED_TRACE(both + ": " + half(0).error.data() + " | " + half(1).error.data());
    const Ends other = half(1 - failing).ends;
    EXPECT_NE(other, Ends::kLost);
    if (killed_) {
      EXPECT_TRUE(other == Ends::kSwapped || other == Ends::kAsBefore);
      ++(other == Ends::kSwapped ? counts.absorbed : counts.undone);
      return;
    }
    if (other == Ends::kAsBefore) {
      EXPECT_GT(std::string(half(1 - failing).error.data()).size(), 20u);
    }
    if (gives == Ends::kLost || takes == Ends::kLost) {
      ++counts.lost;
    } else if (gives == Ends::kAsleep) {
      ++counts.changed;
    } else {
      EXPECT_EQ(gives, takes);
      ++(gives == Ends::kSwapped ? counts.absorbed : counts.undone);
    }
  }

  const Side failing_;
  test::TemporaryDirectory temporary_{test::in_memory()};
  std::array<std::unique_ptr<SwapChannel>, 2> rooms_;  // the second for another try
  Shared* const shared_ =
      new (::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Shared{};
  bool killed_ = false;
};

class SwapHalves : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    ::setenv("TORPOR_LOG", "off", 0);
    for (const uint64_t seed : {1, 2}) (void)uninterrupted(seed);
  }
  // Each occasion of one side, from the first to the last that there is.
  static Counts each(Side failing, uint64_t stride, const std::function<void(World&, uint64_t)>& arm,
                     const Trial::Disarm& disarm, int signal = 0) {
    Counts counts;
    for (uint64_t n = 1;; n += stride) {
      SCOPED_TRACE(testing::Message() << "occasion " << n << (failing == Side::kSwapsOut ? " goes" : " comes"));
      Trial trial(failing, signal == SIGSTOP ? kPeerTimeout : kNoTimeout);
      const bool fired = trial.run(
          counts, [&](World& world) { arm(world, n); }, disarm, signal);
      if (!fired || HasFailure()) return counts;
    }
  }
  static Counts each_allocation(uint64_t stride, bool for_ever, int signal = 0) {
    Counts all;
    for (const Side failing : {Side::kSwapsOut, Side::kSwapsIn}) {
      all.add(each(
          failing, long_run() ? (signal == SIGSTOP ? 5 : 1) : stride,
          [&](World&, uint64_t n) {
            allocations.signal = signal;
            allocations.arm(n, for_ever);
          },
          [](World&) { return allocations.disarm(); }, signal));
    }
    return all;
  }
};

TEST_F(SwapHalves, EveryAllocationOfEitherFails) {
  for (const bool for_ever : {false, true}) {
    const Counts counts = each_allocation(for_ever ? 37 : 23, for_ever);
    print(for_ever ? "allocations of half a swap failed from then on" : "allocations of half a swap failed once",
          counts);
    EXPECT_GT(counts.undone, 10u);
    if (!for_ever) {
      EXPECT_EQ(counts.lost + counts.changed, 0u);
    }
  }
}

TEST_F(SwapHalves, EitherIsKilledAtEveryAllocation) {
  const Counts counts = each_allocation(37, false, SIGKILL);
  print("halves of a swap were killed", counts);
  EXPECT_GT(counts.undone, 10u);
}

TEST_F(SwapHalves, EitherIsStoppedAtEveryAllocationUntilItIsGivenUp) {
  const Counts counts = each_allocation(97, false, SIGSTOP);
  print("halves of a swap were stopped", counts);
  EXPECT_GT(counts.undone, 4u);
  EXPECT_EQ(counts.lost, 0u);
}

TEST_F(SwapHalves, I11EveryHookThrows) {
  for (const bool for_ever : {false, true}) {
    Counts all;
    for (const Side failing : {Side::kSwapsOut, Side::kSwapsIn}) {
      for (const bool after : {false, true}) {
        all.add(each(
            failing, 1,
            [&](World& world, uint64_t n) {
              world.machine->hooks.after = after;
              world.machine->hooks.fuse.arm(n, for_ever);
            },
            [](World& world) { return world.machine->hooks.fuse.disarm(); }));
      }
    }
    print(for_ever ? "hooks of half a swap threw from then on" : "hooks of half a swap threw once", all);
    EXPECT_GT(all.tried, 30u);
    EXPECT_GT(all.undone, 0u);
  }
}

}  // namespace
}  // namespace torpor::proof::engine_faults
