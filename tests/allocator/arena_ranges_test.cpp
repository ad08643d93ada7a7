// SPDX-License-Identifier: Apache-2.0
#include "allocator/arena_ranges.h"

#include <map>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "base/units.h"

namespace torpor {
namespace {

using Range = ArenaRanges::Range;

// Whole slabs of so many pages, all free, at addresses that nobody uses.
std::vector<Range*> slabs_of(ArenaRanges& ranges, const std::vector<uint64_t>& pages) {
  std::vector<Range*> slabs;
  for (const uint64_t count : pages) {
    Range* const slab = slabs.emplace_back(ranges.make());
    slab->data = reinterpret_cast<std::byte*>(slabs.size() << 40);  // NOLINT(performance-no-int-to-ptr)
    slab->size = count * kPage;
    ranges.add(*slab);
  }
  return slabs;
}

TEST(ArenaRanges, WhatIsTakenNeverOverlapsAndAllOfItComesBackWhole) {
  ArenaRanges ranges;
  const std::vector<uint64_t> pages{1, 63, 64, 127, 128, 1000, 16384, 70001};
  const std::vector<Range*> slabs = slabs_of(ranges, pages);
  std::mt19937_64 random(7);
  std::vector<Range*> taken;
  std::map<std::byte*, uint64_t> held;
  const auto overlaps = [&](const Range& range) {
    const auto after = held.upper_bound(range.data);
    if (after != held.end() && after->first < range.data + range.size) return true;
    return after != held.begin() && std::prev(after)->first + std::prev(after)->second > range.data;
  };
  const auto inside = [&](const Range& range) {
    const size_t slab = (reinterpret_cast<uintptr_t>(range.data) >> 40) - 1;
    const uint64_t offset = reinterpret_cast<uintptr_t>(range.data) & ((uint64_t{1} << 40) - 1);
    return offset + range.size <= pages[slab] * kPage;
  };
  for (int i = 0; i < 20'000; ++i) {
    if (random() % 5 < 3) {
      const uint64_t size = (1 + random() % (uint64_t{1} << random() % 13)) * kPage;
      Range* const range = ranges.take(size);
      if (range == nullptr) continue;
      ASSERT_EQ(range->size, size);
      ASSERT_TRUE(inside(*range));
      ASSERT_FALSE(overlaps(*range));
      held[range->data] = size;
      taken.push_back(range);
    } else if (!taken.empty()) {
      std::swap(taken[random() % taken.size()], taken.back());
      held.erase(taken.back()->data);
      ranges.give_back(taken.back());
      taken.pop_back();
    }
  }
  for (Range* const range : taken) ranges.give_back(range);
  for (size_t i = 0; i < slabs.size(); ++i) {
    EXPECT_TRUE(slabs[i]->free);
    EXPECT_EQ(slabs[i]->size, pages[i] * kPage);
  }
}

// Sizes that share a bin: one that fits exactly lies behind others that are a little too small.
TEST(ArenaRanges, WhatFitsIsFoundWhereverItLiesInItsBin) {
  ArenaRanges ranges;
  std::vector<uint64_t> pages(100, 16384);
  pages[0] = 16384 + 200;
  (void)slabs_of(ranges, pages);
  Range* const found = ranges.take((16384 + 200) * kPage);
  ASSERT_NE(found, nullptr);
  EXPECT_EQ(ranges.take((16384 + 1) * kPage), nullptr);
  ranges.give_back(found);
  EXPECT_EQ(ranges.take((16384 + 1) * kPage), found);
}

TEST(ArenaRanges, TheSmallestKindOfRangeThatFitsIsTaken) {
  ArenaRanges ranges;
  const std::vector<Range*> slabs = slabs_of(ranges, {1000, 40, 300, 33, 5000});
  EXPECT_EQ(ranges.take(33 * kPage), slabs[3]);
  EXPECT_EQ(ranges.take(34 * kPage), slabs[1]);
  EXPECT_EQ(ranges.take(41 * kPage), slabs[2]);
  EXPECT_EQ(ranges.take(301 * kPage), slabs[0]);
  EXPECT_EQ(ranges.take(4999 * kPage), slabs[4]);
  EXPECT_EQ(ranges.take(5000 * kPage), nullptr);
}

TEST(ArenaRanges, AWholeSlabThatIsRemovedIsNotFoundUntilItIsAddedAgain) {
  ArenaRanges ranges;
  const std::vector<Range*> slabs = slabs_of(ranges, {64, 64});
  ranges.remove(*slabs[0]);
  Range* const other = ranges.take(64 * kPage);
  EXPECT_EQ(other, slabs[1]);
  EXPECT_EQ(ranges.take(kPage), nullptr);
  ranges.add(*slabs[0]);
  EXPECT_EQ(ranges.take(kPage), slabs[0]);
}

}  // namespace
}  // namespace torpor
