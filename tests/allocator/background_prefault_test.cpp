// SPDX-License-Identifier: Apache-2.0
#include "allocator/background_prefault.h"

#include <filesystem>
#include <string>
#include <thread>

#include <sched.h>

#include "base/units.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::value_of;

constexpr uint64_t kPlenty = kGiB;

TEST(BackgroundPrefault, WhatIsWantedIsThere) {
  const auto arena = value_of(HostArena::create({.slab_bytes = 4 * kMiB}));
  BackgroundPrefault quiet(*arena, [] { return kPlenty; });
  for (const uint64_t wanted : {10 * kMiB, 5 * kMiB, 13 * kMiB}) {
    quiet.want(wanted);
    quiet.wait();
    EXPECT_GE(arena->info().held_bytes, wanted);
    EXPECT_LE(arena->info().held_bytes, 16 * kMiB);
    EXPECT_EQ(arena->info().used_bytes, 0u);
  }
  const uint64_t held = arena->info().held_bytes;
  const HostArena::Span span = value_of(arena->allocate(4 * kMiB));
  EXPECT_EQ(arena->info().held_bytes, held);
}

TEST(BackgroundPrefault, BeginsNothingBeforeItIsTold) {
  const auto arena = value_of(HostArena::create({.slab_bytes = 4 * kMiB}));
  BackgroundPrefault quiet(
      *arena, [] { return kPlenty; }, /*waits=*/true);
  quiet.want(8 * kMiB);
  quiet.wait();
  EXPECT_EQ(arena->info().held_bytes, 0u);
  quiet.start();
  quiet.wait();
  EXPECT_EQ(arena->info().held_bytes, 8 * kMiB);
  quiet.want(12 * kMiB);
  quiet.wait();
  EXPECT_EQ(arena->info().held_bytes, 12 * kMiB);
}

// Of this process some thread stands back for all others, and it is not the one that asks and pins.
TEST(BackgroundPrefault, AThreadOfTheLowestPriorityTouchesThePages) {
  const auto arena = value_of(HostArena::create({.slab_bytes = 4 * kMiB}));
  bool somebody = false;
  bool who_asks = false;
  BackgroundPrefault quiet(*arena, [&] {
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task"))
      somebody = somebody || ::sched_getscheduler(std::stoi(task.path().filename())) == SCHED_IDLE;
    who_asks = who_asks || ::sched_getscheduler(0) == SCHED_IDLE;
    return kPlenty;
  });
  quiet.want(8 * kMiB);
  quiet.wait();
  EXPECT_TRUE(somebody);
  EXPECT_FALSE(who_asks);
}

TEST(BackgroundPrefault, ItEndsWhereTheSystemHasNoRoom) {
  const auto arena = value_of(HostArena::create());
  int pages = 3;
  BackgroundPrefault quiet(*arena, [&] { return pages-- > 0 ? 2 * kMiB : 2 * kMiB - 1; });
  quiet.want(50 * kMiB);
  quiet.wait();
  EXPECT_EQ(arena->info().held_bytes, 6 * kMiB);
  EXPECT_EQ(pages, -1);
  pages = 1;  // until more is wanted
  quiet.want(50 * kMiB);
  quiet.wait();
  EXPECT_EQ(arena->info().held_bytes, 8 * kMiB);
}

TEST(BackgroundPrefault, ItNeverGoesBeyondTheBudget) {
  const auto arena = value_of(HostArena::create({.budget_bytes = 10 * kMiB, .slab_bytes = 4 * kMiB}));
  BackgroundPrefault quiet(*arena, [] { return kPlenty; });
  quiet.want(50 * kMiB);
  quiet.wait();
  EXPECT_EQ(arena->info().held_bytes, 8 * kMiB);
}

TEST(BackgroundPrefault, WhoNeedsFreshMemoryDoesNotWaitForIt) {
  const auto arena = value_of(HostArena::create({.slab_bytes = 8 * kMiB}));
  HostArena::Span taken;
  int pages = 0;
  BackgroundPrefault quiet(*arena, [&] {
    if (++pages == 3)
      taken = value_of(arena->allocate(6 * kMiB));  // on its thread: if it had to wait, it would for ever
    return kPlenty;
  });
  quiet.want(8 * kMiB);
  quiet.wait();
  EXPECT_EQ(arena->info().used_bytes, 6 * kMiB);
  // Two pages that had come, a slab for who could not wait, of which he left one, and the one that is missing then.
  EXPECT_EQ(arena->info().held_bytes, (4 + 8 + 2) * kMiB);
}

TEST(BackgroundPrefault, WhereTheBudgetIsShortItGivesBackWhatItHasNotBroughtUp) {
  for (int round = 0; round < 20; ++round) {
    const auto arena = value_of(HostArena::create({.budget_bytes = 16 * kMiB, .slab_bytes = 16 * kMiB}));
    HostArena::Span taken;
    std::thread sleep;
    int pages = 0;
    BackgroundPrefault quiet(*arena, [&] {
      if (++pages == 3) sleep = std::thread([&] { taken = value_of(arena->allocate(8 * kMiB)); });
      return kPlenty;
    });
    quiet.want(16 * kMiB);
    quiet.wait();
    sleep.join();
    EXPECT_EQ(taken.bytes().size(), 8 * kMiB);
    EXPECT_LE(arena->info().held_bytes, 16 * kMiB);
  }
}

TEST(BackgroundPrefault, ItEndsAtOnceAndForEver) {
  const auto arena = value_of(HostArena::create());
  int pages = 0;
  BackgroundPrefault* of_thread = nullptr;
  BackgroundPrefault quiet(*arena, [&] {
    if (++pages == 2) of_thread->end();
    return kPlenty;
  });
  of_thread = &quiet;
  quiet.want(50 * kMiB);
  quiet.wait();
  EXPECT_EQ(pages, 2);
  EXPECT_EQ(arena->info().held_bytes, 4 * kMiB);
  quiet.want(60 * kMiB);
  quiet.wait();
  EXPECT_EQ(arena->info().held_bytes, 4 * kMiB);
}

TEST(BackgroundPrefault, ItsOwnerMayEndInTheMiddle) {
  for (int round = 0; round < 20; ++round) {
    const auto arena = value_of(HostArena::create({.slab_bytes = 2 * kMiB}));
    BackgroundPrefault quiet(*arena, [] { return kPlenty; });
    quiet.want(kGiB);
    if (round % 2 == 0) std::this_thread::yield();
  }
}

}  // namespace
}  // namespace torpor
