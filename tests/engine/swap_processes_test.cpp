// SPDX-License-Identifier: Apache-2.0
// A swap of engines in two processes, each of which does its half (SleepOptions::swap_out_to,
// WakeOptions::swap_in_from): both or none, wherever one of them fails or is killed.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>

#include "base/progress_file.h"
#include "base/swap_channel.h"
#include "engine/sleep_controller.h"
#include "tests/engine/sleep_failure.h"
#include "tests/engine/swap_engines.h"
#include "tests/support/manual_clock.h"
#include "tests/support/shared_event.h"

namespace torpor {
namespace {

using namespace test;

constexpr int kNever = -1;

// Where one is stopped: more than who runs waits for a core.
constexpr SwapChannel::Seconds kPeerTimeout = std::chrono::milliseconds{500};

// Where the process of one half ends, is stopped until the other half is over, or fails.
struct Plan {
  std::string kill_before{};  // this hook
  int kill_at_page = kNever;  // that went, or came
  std::string fail{};         // this hook
  std::string stop_before{};  // this hook
  int stop_at_page = kNever;
  bool stops() const { return !stop_before.empty() || stop_at_page != kNever; }
};

// What both processes see.
struct Shared {
  std::array<std::atomic<uint64_t>, 2> bytes;
  std::atomic<uint64_t> peak;
  std::array<SharedEvent, 2> over;  // the call of each half
};

class SwapProcessesTest : public SleepFailure {
 protected:
  ~SwapProcessesTest() override { ::munmap(shared_, sizeof(Shared)); }

  enum class Ends : uint8_t { kSwapped, kAsBefore, kKilled };
  // Both halves, each in a process of its own; returns how each ended. What each expects it checks itself.
  void swap(const Plan& giver, const Plan& taker, int ranks = 1) {
    const bool swaps = giver.kill_before.empty() && giver.kill_at_page == kNever && giver.fail.empty() &&
                       taker.kill_before.empty() && taker.kill_at_page == kNever && taker.fail.empty() &&
                       !giver.stops() && !taker.stops();
    const std::string path = temporary_ / ("room-" + std::to_string(++rooms_));
    const std::unique_ptr<SwapChannel> room = value_of(
        SwapChannel::create(path, giver.stops() || taker.stops() ? kPeerTimeout : SwapChannel::kDefaultPeerTimeout));
    for (SharedEvent& over : shared_->over) over.reset();
    const pid_t gives = in_child([&] { give(path, giver, swaps, ranks, taker.stops()); });
    const pid_t takes = in_child([&] { take(path, taker, swaps, ranks, giver.stops()); });
    if (giver.stops()) go_on_when_over(gives, 1);
    if (taker.stops()) go_on_when_over(takes, 0);
    EXPECT_EQ(ended(gives), kills(giver) ? Ends::kKilled : Ends::kSwapped) << "the one that goes";
    EXPECT_EQ(ended(takes), kills(taker) ? Ends::kKilled : Ends::kSwapped) << "the one that comes";
  }
  static bool kills(const Plan& plan) { return !plan.kill_before.empty() || plan.kill_at_page != kNever; }

  template <class Work>
  static pid_t in_child(const Work& work) {
    const pid_t child = ::fork();
    if (child != 0) return child;
    work();
    (void)std::fflush(nullptr);
    ::_exit(testing::Test::HasFailure() ? 1 : 0);
  }
  // Continues one that stops, when the other half has come to its end.
  void go_on_when_over(pid_t child, size_t other) {
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, WUNTRACED), child);
    EXPECT_TRUE(WIFSTOPPED(status));
    EXPECT_TRUE(shared_->over[other].wait(std::chrono::seconds{60})) << "it waits for one that is stopped";
    EXPECT_EQ(::kill(child, SIGCONT), 0);
  }
  static Ends ended(pid_t child) {
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) return Ends::kKilled;
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? Ends::kSwapped : Ends::kAsBefore;
  }

  void follow(SleepingEngine& half, const Plan& plan, int ranks, size_t side) const {
    half.engine.before_hook = [plan](const std::string& hook) {
      if (hook == plan.kill_before) (void)::raise(SIGKILL);
      if (hook == plan.stop_before) (void)::raise(SIGSTOP);
    };
    if (!plan.fail.empty()) half.engine.fail_hook(plan.fail);
    uint64_t all = 0;
    for (int rank = 0; rank < ranks; ++rank) all += half.engine.device(rank).info().physical_bytes;
    shared_->bytes[side] = all;
    // What goes only goes, and what comes only comes, page by page.
    const auto count = [this, plan, side, pages = std::make_shared<std::atomic<int>>(0)] {
      shared_->bytes[side] += side == 0 ? -kSwapPageBytes : kSwapPageBytes;
      const uint64_t both = shared_->bytes[0] + shared_->bytes[1];
      for (uint64_t peak = shared_->peak; peak < both && !shared_->peak.compare_exchange_weak(peak, both);) {}
      const int page = ++*pages;
      if (page == plan.kill_at_page) (void)::raise(SIGKILL);
      if (page == plan.stop_at_page) (void)::raise(SIGSTOP);
    };
    for (int rank = 0; rank < ranks; ++rank) half.engine.device(rank).on_change(count);
  }
  static void end_half(SleepingEngine& half, int ranks) {
    half.engine.before_hook = nullptr;
    half.engine.fail_hook("");
    for (int rank = 0; rank < ranks; ++rank) half.engine.device(rank).on_change({});
  }
  template <class Report>
  static void expect_undone(const Result<Report>& half, const Plan& own, bool other_stops) {
    if (own.stops()) {
      EXPECT_FAILS(half, Code::kAborted, "has given it up");
    } else if (other_stops) {
      EXPECT_FAILS(half, Code::kTimeout, "no heartbeat of the engine");
    } else if (own.fail.empty()) {
      EXPECT_FAILS(half, Code::kAborted, "other engine");
    } else {
      EXPECT_FAILS(half, Code::kInternal, own.fail);
    }
    EXPECT_FALSE(half.error().state_changed) << half.error().to_string();
  }

  void give(const std::string& path, const Plan& plan, bool swaps, int ranks, bool other_stops = false) {
    SleepingEngine half = make(paged(1, ranks));
    begin(half.engine);
    follow(half, plan, ranks, 0);
    const Result<SleepReport> gave = half.controller.sleep({.preserve_state = true, .swap_out_to = path});
    shared_->over[0].set();
    end_half(half, ranks);
    if (swaps) {
      ASSERT_SUCCEEDS(gave);
      EXPECT_GT(gave->saved_bytes, kWeightBytes);
      EXPECT_EQ(half.controller.state().engine, "asleep");
      EXPECT_EQ(half.engine.device().info().physical_bytes, 0u);
      ASSERT_SUCCEEDS(half.controller.wake_up({}));
    } else {
      expect_undone(gave, plan, other_stops);
      EXPECT_EQ(half.controller.state().engine, "awake");
      EXPECT_FALSE(half.engine.frozen());
    }
    EXPECT_EQ(finish(half.engine), uninterrupted(paged(1, ranks)));
    EXPECT_EQ(half.engine.recomputed(), 0);
  }
  void take(const std::string& path, const Plan& plan, bool swaps, int ranks, bool other_stops = false) {
    SleepingEngine half = make(paged(2, ranks));
    begin(half.engine, 4);
    ASSERT_SUCCEEDS(half.controller.sleep(to_host()));
    follow(half, plan, ranks, 1);
    const Result<SleepReport> took = half.controller.wake_up({.swap_in_from = path});
    shared_->over[1].set();
    end_half(half, ranks);
    if (swaps) {
      ASSERT_SUCCEEDS(took);
      EXPECT_TRUE(took->fully_awake);
      EXPECT_GT(took->restored_bytes, kWeightBytes);
    } else {
      expect_undone(took, plan, other_stops);
      EXPECT_EQ(half.controller.state().engine, "asleep");
      EXPECT_EQ(half.engine.device().info().physical_bytes, 0u);
      ASSERT_SUCCEEDS(half.controller.wake_up({}));
    }
    EXPECT_EQ(finish(half.engine), uninterrupted(paged(2, ranks)));
    EXPECT_EQ(half.engine.recomputed(), 0);
  }

  Shared* const shared_ =
      new (::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Shared{};
  int rooms_ = 0;
};

TEST_F(SwapProcessesTest, TwoProcessesExchangeTheMemoryOfOne) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(testing::Message() << ranks << " ranks");
    uint64_t one = 0;
    for (int rank = 0; rank < ranks; ++rank) one += make(paged(1)).engine.device().info().physical_bytes;
    shared_->peak = 0;
    shared_->bytes[0] = shared_->bytes[1] = 0;
    swap({}, {}, ranks);
    EXPECT_EQ(shared_->peak, one) << "both together had more than one of them";
  }
}

TEST_F(SwapProcessesTest, WhereverTheOneThatGoesIsKilledTheOtherStaysAsleep) {
  for (const char* hook : {"quiesce", "capture", "release_derived", "rank save", "rank detach"}) {
    SCOPED_TRACE(hook);
    swap({.kill_before = hook}, {});
  }
  for (const int page : {1, 3, 8}) {
    SCOPED_TRACE(testing::Message() << "page " << page);
    swap({.kill_at_page = page}, {});
  }
}

TEST_F(SwapProcessesTest, WhereverTheOneThatComesIsKilledTheOtherServesOn) {
  for (const char* hook : {"rank restore", "rebuild_derived", "reconnect", "rank finish", "resume"}) {
    SCOPED_TRACE(hook);
    swap({}, {.kill_before = hook});
  }
  for (const int page : {1, 3, 8}) {
    SCOPED_TRACE(testing::Message() << "page " << page);
    swap({}, {.kill_at_page = page});
  }
}

TEST_F(SwapProcessesTest, WhereverOneFailsBothAreAsBefore) {
  for (const char* hook : {"quiesce", "capture", "rank save", "rank detach"}) {
    SCOPED_TRACE(hook);
    swap({.fail = hook}, {});
  }
  for (const char* hook : {"rank restore", "reconnect", "rank finish"}) {
    SCOPED_TRACE(hook);
    swap({}, {.fail = hook}, 2);
  }
}

TEST_F(SwapProcessesTest, AnEngineThatIsStoppedIsGivenUpAndUndoesItsHalfWhenItGoesOn) {
  for (const char* hook : {"quiesce", "rank save", "rank detach"}) {
    SCOPED_TRACE(hook);
    swap({.stop_before = hook}, {});
  }
  for (const char* hook : {"rank restore", "reconnect"}) {
    SCOPED_TRACE(hook);
    swap({}, {.stop_before = hook});
  }
  swap({.stop_at_page = 3}, {});
  swap({}, {.stop_at_page = 3});
}

TEST_F(SwapProcessesTest, AnEngineThatIsStoppedWhenItHasCommittedRunsAndTheOtherSaysThatItIsAsleep) {
  const std::string path = temporary_ / "room";
  const std::unique_ptr<SwapChannel> room = value_of(SwapChannel::create(path, kPeerTimeout));
  const pid_t gives = in_child([&] {
    SleepingEngine half = make(paged(1));
    begin(half.engine);
    const Result<SleepReport> gave = half.controller.sleep({.preserve_state = true, .swap_out_to = path});
    EXPECT_FAILS(gave, Code::kTimeout,
                 "has not said that it runs, and sends no heartbeat; the engine that went stays asleep");
    EXPECT_TRUE(gave.error().state_changed);
    EXPECT_EQ(half.controller.state().engine, "asleep");
    shared_->over[0].set();
    ASSERT_SUCCEEDS(half.controller.wake_up({}));
    EXPECT_EQ(finish(half.engine), uninterrupted(paged(1)));
  });
  const pid_t takes = in_child([&] { take(path, {.stop_before = "rank finish"}, true, 1); });
  go_on_when_over(takes, 0);
  EXPECT_EQ(ended(gives), Ends::kSwapped);
  EXPECT_EQ(ended(takes), Ends::kSwapped);
}

// All that it has is in host memory when nobody answers: it is asleep then, and not lost.
TEST_F(SwapProcessesTest, MemoryOfOneThatIsStoppedIsNotWaitedForForEver) {
  const std::string path = temporary_ / "room";
  const std::unique_ptr<SwapChannel> room = value_of(SwapChannel::create(path, kPeerTimeout));
  const pid_t gives = in_child([&] {
    TestEngineOptions options = paged(1);
    options.device_capacity_bytes = 20 * kSwapPageBytes;
    ManualClock clock;
    SleepingEngine half(file_system_, temporary_.path(), options, {}, {}, clock);
    begin(half.engine);
    DeviceMemory& device = half.engine.device();
    std::optional<PhysicalId> others;
    half.engine.before_hook = [&](const std::string& hook) {
      if (hook != "rank restore" && hook != "rank undo_released_pages") return;
      if (!others) others = value_of(device.create(20 * kSwapPageBytes - device.info().physical_bytes));
      clock.advance(std::chrono::seconds{20});
    };
    const Result<SleepReport> gave = half.controller.sleep({.preserve_state = true, .swap_out_to = path});
    half.engine.before_hook = nullptr;
    EXPECT_FAILS(gave, Code::kTimeout, "the engine that went stays asleep");
    EXPECT_TRUE(gave.error().state_changed);
    EXPECT_EQ(half.controller.state().engine, "asleep");
    shared_->over[0].set();
    EXPECT_SUCCEEDS(device.release(*others));
    ASSERT_SUCCEEDS(half.controller.wake_up({}));
    EXPECT_EQ(finish(half.engine), uninterrupted(paged(1)));
  });
  const pid_t takes = in_child([&] { take(path, {.stop_at_page = 3}, false, 1); });
  go_on_when_over(takes, 0);
  EXPECT_EQ(ended(gives), Ends::kSwapped);
  EXPECT_EQ(ended(takes), Ends::kSwapped);
}

// What a process had that was killed is free some time after its end.
TEST_F(SwapProcessesTest, MemoryThatComesLateIsWaitedFor) {
  const std::string path = temporary_ / "late";
  const std::unique_ptr<SwapChannel> room = value_of(SwapChannel::create(path));
  const pid_t gives = in_child([&] {
    TestEngineOptions options = paged(1);
    options.device_capacity_bytes = 20 * kSwapPageBytes;
    SleepingEngine half = make(options);
    begin(half.engine);
    std::optional<PhysicalId> others;
    int attempts = 0;
    half.engine.before_hook = [&](const std::string& hook) {
      if (hook != "rank undo_released_pages") return;
      DeviceMemory& device = half.engine.device();
      if (!others) others = value_of(device.create(20 * kSwapPageBytes - device.info().physical_bytes));
      if (++attempts != 5) return;
      EXPECT_SUCCEEDS(half.engine.device().release(*others));
    };
    EXPECT_FAILS(half.controller.sleep({.preserve_state = true, .swap_out_to = path}), Code::kAborted, "process");
    half.engine.before_hook = nullptr;
    EXPECT_EQ(attempts, 5);
    EXPECT_EQ(finish(half.engine), uninterrupted(paged(1)));
  });
  const pid_t takes = in_child([&] { take(path, {.kill_before = "rank restore"}, false, 1); });
  EXPECT_EQ(ended(takes), Ends::kKilled);
  EXPECT_EQ(ended(gives), Ends::kSwapped);
}

TEST_F(SwapProcessesTest, WhatCannotBeExchangedIsRefusedAndTheOtherIsTold) {
  const std::string path = temporary_ / "room";
  const std::unique_ptr<SwapChannel> room = value_of(SwapChannel::create(path));
  const pid_t gives = in_child([&] {
    SleepingEngine half = make(paged(1, 2));
    begin(half.engine);
    half.engine.before_hook = [](const std::string& hook) { EXPECT_NE(hook, "quiesce"); };
    const Result<SleepReport> gave = half.controller.sleep({.preserve_state = true, .swap_out_to = path});
    EXPECT_FALSE(gave);
    EXPECT_EQ(half.controller.state().engine, "awake");
  });
  const pid_t takes = in_child([&] {
    SleepingEngine half = make(paged(2));
    ASSERT_SUCCEEDS(half.controller.sleep(to_host()));
    EXPECT_FALSE(half.controller.wake_up({.swap_in_from = path}));
    EXPECT_EQ(half.controller.state().engine, "asleep");
  });
  EXPECT_EQ(ended(gives), Ends::kSwapped);
  EXPECT_EQ(ended(takes), Ends::kSwapped);
}

TEST_F(SwapProcessesTest, AHalfIsAskedForNothingElse) {
  const std::string path = temporary_ / "room";
  const std::unique_ptr<SwapChannel> room = value_of(SwapChannel::create(path));
  SleepingEngine half = make(paged(1));
  begin(half.engine);
  for (const SleepOptions& options :
       {SleepOptions{.in_flight = "abort", .swap_out_to = path},
        SleepOptions{.level = 2, .in_flight = "abort", .swap_out_to = path},
        SleepOptions{.preserve_state = true, .weights = Weights::kReload, .swap_out_to = path},
        SleepOptions{.preserve_state = true, .tags = {"weights"}, .swap_out_to = path}})
    EXPECT_FAILS(half.controller.sleep(options), Code::kInvalidArgument, "swap");
  EXPECT_FAILS(half.controller.wake_up({.early = true, .swap_in_from = path}), Code::kInvalidArgument, "swap");
  EXPECT_FAILS(half.controller.wake_up({.swap_in_from = path}), Code::kFailedPrecondition, "that is to come is awake");
  EXPECT_EQ(room->stopped_by(), SwapChannel::Side::kSwapsIn);
  EXPECT_FAILS(half.controller.sleep({.preserve_state = true, .swap_out_to = temporary_ / "none"}), Code::kNotFound,
               "none");

  // Nobody comes, and it is cancelled.
  const std::string waits = temporary_ / "waits";
  const std::unique_ptr<SwapChannel> nobody = value_of(SwapChannel::create(waits));
  const std::string progress = temporary_ / "progress";
  value_of(ProgressFile::create(progress))->cancel();
  EXPECT_FAILS(half.controller.sleep({.preserve_state = true, .progress = progress, .swap_out_to = waits}),
               Code::kAborted, "cancelled");
  EXPECT_EQ(half.controller.state().engine, "awake");
  EXPECT_EQ(finish(half.engine), uninterrupted(paged(1)));
}

}  // namespace
}  // namespace torpor
