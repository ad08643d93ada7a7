// SPDX-License-Identifier: Apache-2.0
// ArenaRanges: which ranges of an arena's slabs are free, found by size in constant time, whatever the number of ranges
// and slabs.
//
// Free ranges lie in bins by size: each power of two is divided in 64, and words of bits say which bins have some. A
// range of a bin above the wanted size always fits. In the bin of the wanted size itself a few are looked at first, and
// all of them only where nothing larger is free: memory that is there is found. Each range knows its neighbours in its
// slab, so that a range that comes back is joined with them without a search.
//
// Owner: HostArena. Threads: none of its own; the owner's lock. Failure: take() and make() may want memory for a range,
// and have changed nothing when they throw; give_back() takes none.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>

namespace torpor {

class ArenaRanges {
 public:
  // A part of a slab, in somebody's hands or free. Sizes are whole pages. One line of the processor's cache.
  struct alignas(64) Range {
    std::byte* data = nullptr;  // only computed with
    uint64_t size = 0;
    bool free = false;
    Range* before = nullptr;  // in the slab
    Range* after = nullptr;
    Range* previous = nullptr;  // in the bin
    Range* next = nullptr;
  };

  ArenaRanges() = default;
  ArenaRanges(const ArenaRanges&) = delete;
  ArenaRanges& operator=(const ArenaRanges&) = delete;

  // Return a range that is not free, without memory; lives until forget(), or as long as this.
  Range* make();
  void forget(Range* range) noexcept;
  // Let a whole slab's range be found, or not any more.
  void add(Range& range) noexcept;
  void remove(Range& range) noexcept;
  // Return a range of exactly `size` bytes, out of one of the smallest free ones that fit; null if there is none.
  Range* take(uint64_t size);
  // Join `range` with its free neighbours; what remains of them is free.
  void give_back(Range* range) noexcept;

 private:
  static constexpr unsigned kSplit = 6;            // bins a power of two, as a power of two
  static constexpr unsigned kBins = 1u << kSplit;  // as many as a word has bits
  static constexpr unsigned kLevels = 48;          // of pages: more than there are addresses
  struct Bin {
    unsigned level = 0;
    unsigned index = 0;
  };
  static Bin bin_of(uint64_t size);
  Range* find(uint64_t size) const;

  std::array<std::array<Range*, kBins>, kLevels> bins_{};
  std::array<uint64_t, kLevels> filled_{};  // a bit for each bin that has ranges
  uint64_t levels_ = 0;                     // a bit for each level that has some
  std::deque<Range> all_;
  Range* unused_ = nullptr;  // of all_, linked by `next`
};

}  // namespace torpor
