// SPDX-License-Identifier: Apache-2.0
#include "allocator/host_arena.h"

#include <cstring>
#include <random>
#include <thread>

#include <gmock/gmock.h>

#include "base/units.h"
#include "tests/support/mapping_flags.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::value_of;

TEST(HostArena, SpansAreAlignedAndGiveThemselvesBack) {
  const auto arena = value_of(HostArena::create({.slab_bytes = 2 * kMiB}));
  {
    const HostArena::Span a = value_of(arena->allocate(1));
    const HostArena::Span b = value_of(arena->allocate(5000));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a.bytes().data()) % 4096, 0u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(b.bytes().data()) % 4096, 0u);
    EXPECT_EQ(b.bytes().size(), 5000u);
    EXPECT_EQ(arena->info().used_bytes, 4096u + 8192u);
  }
  EXPECT_EQ(arena->info().used_bytes, 0u);
  EXPECT_EQ(arena->info().held_bytes, 2 * kMiB);
}

TEST(HostArena, TheFirstSlabsAreSmallSoThatStagingMemoryComesAtOnce) {
  const auto arena = value_of(HostArena::create());
  std::vector<HostArena::Span> spans;
  for (const uint64_t held : {8, 8, 16, 16, 32, 32, 32, 32, 64}) {
    spans.push_back(value_of(arena->allocate(4 * kMiB)));
    EXPECT_EQ(arena->info().held_bytes, held * kMiB);
  }
  while (arena->info().held_bytes < 256 * kMiB) spans.push_back(value_of(arena->allocate(4 * kMiB)));
  EXPECT_EQ(arena->info().held_bytes, 256 * kMiB);  // by whole slabs of 64 MiB
  ASSERT_SUCCEEDS(arena->prefault(200 * kMiB));
  EXPECT_GE(arena->info().held_bytes - arena->info().used_bytes, 200 * kMiB);
}

TEST(HostArena, HeldMemoryIsUsedAgain) {
  const auto arena = value_of(HostArena::create({.slab_bytes = 2 * kMiB}));
  for (int i = 0; i < 100; ++i) ASSERT_SUCCEEDS(arena->allocate(2 * kMiB));
  EXPECT_EQ(arena->info().held_bytes, 2 * kMiB);
}

TEST(HostArena, MemoryThatTheSystemDoesNotHaveIsNotTaken) {
  std::optional<uint64_t> free = kGiB;
  const auto arena = value_of(HostArena::create({.free_memory = [&] { return free; }}));
  const auto expect_refused = [](const auto& result) {
    EXPECT_FAILS(result, Code::kResourceExhausted, std::to_string(kGiB) + " are free");
  };
  expect_refused(arena->prefault(2 * kGiB));
  expect_refused(arena->prefault_ahead(2 * kGiB));
  expect_refused(arena->allocate(2 * kGiB));
  expect_refused(arena->check_free(2 * kGiB));
  expect_refused(arena->ensure_free(2 * kGiB));
  EXPECT_EQ(arena->info().held_bytes, 0u);
  free = 0;
  arena->prefault_in_background(1);
  EXPECT_FAILS(arena->wait_prefault(), Code::kResourceExhausted, "are free");
}

TEST(HostArena, OfLittleFreeMemoryItTakesWhatIsAskedFor) {
  std::optional<uint64_t> free = 6 * kMiB;
  const auto arena = value_of(
      HostArena::create({.slab_bytes = 64 * kMiB, .piece_bytes = 2 * kMiB, .free_memory = [&] { return free; }}));
  EXPECT_SUCCEEDS(arena->check_free(6 * kMiB));
  const HostArena::Ahead ahead = value_of(arena->prefault_ahead(5 * kMiB));
  EXPECT_EQ(arena->info().held_bytes, 5 * kMiB);  // at once, and no whole slab
  free = 0;
  EXPECT_SUCCEEDS(arena->check_free(5 * kMiB));  // it is held
  EXPECT_FAILS(arena->check_free(5 * kMiB + 1), Code::kResourceExhausted, "4096 more wanted");
  HostArena::Span span = value_of(arena->allocate(5 * kMiB));
  EXPECT_FAILS(arena->allocate(1), Code::kResourceExhausted);
  free = {};  // not known
  EXPECT_SUCCEEDS(arena->allocate(1));
}

// Several ranks that fall asleep at once have each found enough for itself.
TEST(HostArena, MemoryThatOthersTakeMeanwhileIsNotTaken) {
  uint64_t free = 0;
  uint64_t goes = 0;  // from look to look
  const auto arena = value_of(HostArena::create({.free_memory = [&] {
    const uint64_t now = free;
    free -= std::min(free, goes);
    return now;
  }}));
  for (const bool with_others : {true, false}) {
    free = 20 * kMiB;
    goes = with_others ? 3 * kMiB : 2 * kMiB;  // this arena's pieces
    const Status taken = arena->prefault(16 * kMiB);
    if (!with_others) {
      EXPECT_SUCCEEDS(taken);
      continue;
    }
    EXPECT_FAILS(taken, Code::kResourceExhausted, "are free");
    EXPECT_GT(free, 0u);
    EXPECT_EQ(arena->info().held_bytes, 0u);
  }
}

// The arena reclaims memory of others before it refuses anything.
TEST(HostArena, WithoutFreeMemoryItReclaimsThatOfOthers) {
  uint64_t free = 4 * kMiB;
  const auto arena = value_of(HostArena::create({.slab_bytes = 2 * kMiB, .free_memory = [&] { return free; }}));
  HostArena::Span cached = value_of(arena->allocate(4 * kMiB));
  free = 0;
  arena->set_reclaim([&](uint64_t) { return std::exchange(cached, {}).bytes().size(); });
  EXPECT_FAILS(arena->check_free(4 * kMiB), Code::kResourceExhausted);
  EXPECT_FALSE(cached.empty());
  EXPECT_SUCCEEDS(arena->ensure_free(4 * kMiB));
  EXPECT_TRUE(cached.empty());
  EXPECT_SUCCEEDS(arena->allocate(4 * kMiB));
}

TEST(HostArena, TheBudgetIsNeverExceededAndTheErrorHasBothNumbers) {
  const auto arena = value_of(HostArena::create({.budget_bytes = 2 * kMiB, .slab_bytes = 2 * kMiB}));
  HostArena::Span first = value_of(arena->allocate(2 * kMiB));
  EXPECT_FAILS(arena->allocate(4096), Code::kResourceExhausted, std::to_string(2 * kMiB));
  EXPECT_FAILS(arena->prefault(1), Code::kResourceExhausted);
  first = {};
  EXPECT_SUCCEEDS(arena->allocate(2 * kMiB));
  EXPECT_LE(arena->info().held_bytes, 2 * kMiB);
}

TEST(HostArena, TrimGivesBackOnlySlabsThatNobodyUses) {
  const auto arena = value_of(HostArena::create({.slab_bytes = 2 * kMiB}));
  HostArena::Span kept = value_of(arena->allocate(100));
  { const HostArena::Span large = value_of(arena->allocate(4 * kMiB)); }
  std::memset(kept.bytes().data(), 9, 100);
  EXPECT_EQ(arena->trim(6 * kMiB), 0u);
  EXPECT_EQ(arena->trim(5 * kMiB), 4 * kMiB);
  EXPECT_EQ(kept.bytes()[99], std::byte{9});
  kept = {};
  EXPECT_EQ(arena->trim(), 2 * kMiB);
  EXPECT_EQ(arena->info().held_bytes, 0u);
}

TEST(HostArena, TrimLeavesAsMuchUnusedMemoryAsItIsAskedTo) {
  const auto arena = value_of(HostArena::create({.slab_bytes = 2 * kMiB}));
  const HostArena::Span used = value_of(arena->allocate(2 * kMiB));
  {
    const HostArena::Span large = value_of(arena->allocate(6 * kMiB));
    const HostArena::Span small = value_of(arena->allocate(2 * kMiB));
  }
  EXPECT_EQ(arena->trim(0, 8 * kMiB), 0u);
  EXPECT_EQ(arena->trim(0, 5 * kMiB), 2 * kMiB) << "the large one alone is enough";
  EXPECT_EQ(arena->trim(0, 7 * kMiB), 0u) << "less is there";
  EXPECT_EQ(arena->trim(0, 1), 0u) << "nothing else would be left";
  EXPECT_EQ(arena->trim(0, 0), 6 * kMiB);
}

TEST(HostArena, AsksBeforeItTakesMemoryWhetherItShallBeInHugePages) {
  int asked = 0;
  const auto arena = value_of(HostArena::create({.slab_bytes = 2 * kMiB, .huge_pages = [&] { return ++asked == 0; }}));
  const HostArena::Span span = value_of(arena->allocate(4 * kMiB));
  EXPECT_EQ(asked, 1);
  EXPECT_THAT(test::flags_of_memory_at(span.bytes().data()), ::testing::HasSubstr(" nh"));
}

TEST(HostArena, RandomSpansNeverOverlapAndAllMemoryComesBack) {
  const auto arena = value_of(HostArena::create({.slab_bytes = 256 * kKiB}));
  std::mt19937 random(5);
  std::vector<std::pair<HostArena::Span, uint8_t>> spans;
  for (int i = 0; i < 3000; ++i) {
    if (spans.empty() || random() % 3 != 0) {
      const auto mark = static_cast<uint8_t>(random());
      spans.emplace_back(value_of(arena->allocate(1 + random() % 40'000)), mark);
      std::memset(spans.back().first.bytes().data(), mark, spans.back().first.bytes().size());
    } else {
      std::swap(spans[random() % spans.size()], spans.back());
      for (const std::byte byte : spans.back().first.bytes())
        ASSERT_EQ(byte, static_cast<std::byte>(spans.back().second));
      spans.pop_back();
    }
  }
  spans.clear();
  EXPECT_EQ(arena->info().used_bytes, 0u);
  arena->trim();
  EXPECT_EQ(arena->info().held_bytes, 0u);
}

TEST(HostArena, ManyThreadsShareOneArena) {
  const auto arena = value_of(HostArena::create({.slab_bytes = 256 * kKiB}));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        const HostArena::Span span = value_of(arena->allocate(4096 * static_cast<uint64_t>(1 + (i + t) % 7)));
        std::memset(span.bytes().data(), t, span.bytes().size());
        EXPECT_EQ(span.bytes().back(), static_cast<std::byte>(t));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(arena->info().used_bytes, 0u);
}

TEST(HostArena, ManyThreadsMayWaitForTheSamePrefault) {
  for (int round = 0; round < 20; ++round) {
    const auto arena = value_of(HostArena::create({.slab_bytes = 2 * kMiB, .prefault_threads = 1}));
    arena->prefault_in_background(4 * kMiB);
    std::vector<std::thread> threads;
    for (int t = 0; t < 8; ++t) {
      threads.emplace_back([&] {
        EXPECT_SUCCEEDS(arena->wait_prefault());
        EXPECT_GE(arena->info().held_bytes, 4 * kMiB);
      });
    }
    for (std::thread& thread : threads) thread.join();
    arena->prefault_in_background(6 * kMiB);
    EXPECT_SUCCEEDS(arena->wait_prefault());
    EXPECT_GE(arena->info().held_bytes, 6 * kMiB);
  }
}

TEST(HostArena, ANegativeThreadCountIsRefused) {
  EXPECT_FAILS(HostArena::create({.prefault_threads = -1}), Code::kInvalidArgument);
}

}  // namespace
}  // namespace torpor
