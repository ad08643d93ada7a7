// SPDX-License-Identifier: Apache-2.0
// ArenaRanges: the free ranges of an arena's slabs. It finds one by size in constant time, however many ranges and
// slabs there are.
//
// Free ranges lie in bins by size. Each power of two is divided into 64 bins, and words of bits say which bins are not
// empty. Every range of a bin above the wanted size fits. take() first tries a few ranges of the wanted size's own bin,
// then a larger bin. If no larger range is free it tries the whole own bin, so it never misses memory that would fit.
// Each range knows its neighbours in its slab, so a returned range joins them without a search.
//
// Owner: HostArena. Threads: none of its own; the owner's lock guards it. Failure: take() and make() may allocate; if
// they throw they have changed nothing. give_back() allocates nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>

namespace torpor {

class ArenaRanges {
 public:
  // A part of a slab, used or free. Sizes are whole pages. Fills one cache line.
  struct alignas(64) Range {
    std::byte* data = nullptr;  // an address; never read or written here
    uint64_t size = 0;
    bool free = false;
    Range* before = nullptr;  // neighbours in the slab
    Range* after = nullptr;
    Range* previous = nullptr;  // neighbours in the bin
    Range* next = nullptr;
  };

  ArenaRanges() = default;
  ArenaRanges(const ArenaRanges&) = delete;
  ArenaRanges& operator=(const ArenaRanges&) = delete;

  // Return a new range that is not free and has no memory. It lives until forget(), or as long as this object.
  Range* make();
  void forget(Range* range) noexcept;
  // Add the range of a whole slab to the free ranges, or remove it from them.
  void add(Range& range) noexcept;
  void remove(Range& range) noexcept;
  // Take a range of exactly `size` bytes from one of the smallest free ranges that fit. Null: none fits.
  Range* take(uint64_t size);
  // Free a range and join it with its free neighbours.
  void give_back(Range* range) noexcept;

 private:
  static constexpr unsigned kSplit = 6;            // log2 of the bins per power of two
  static constexpr unsigned kBins = 1u << kSplit;  // one bin for each bit of a word
  static constexpr unsigned kLevels = 48;          // covers more pages than there are addresses
  struct Bin {
    unsigned level = 0;
    unsigned index = 0;
  };
  static Bin bin_of(uint64_t size);
  Range* find(uint64_t size) const;

  std::array<std::array<Range*, kBins>, kLevels> bins_{};
  std::array<uint64_t, kLevels> filled_{};  // a bit for each bin that is not empty
  uint64_t levels_ = 0;                     // a bit for each level that is not empty
  std::deque<Range> all_;
  Range* unused_ = nullptr;  // entries of all_ to be used again, linked by `next`
};

}  // namespace torpor
