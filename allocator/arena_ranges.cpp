// SPDX-License-Identifier: Apache-2.0
#include "allocator/arena_ranges.h"

#include <bit>

#include "base/units.h"

namespace torpor {
namespace {

constexpr int kTries = 4;  // ranges of the own bin to try before a larger bin

}  // namespace

ArenaRanges::Range* ArenaRanges::make() {
  if (unused_ == nullptr) return &all_.emplace_back();
  Range* const range = unused_;
  unused_ = range->next;
  *range = {};
  return range;
}

void ArenaRanges::forget(Range* range) noexcept {
  range->next = unused_;
  unused_ = range;
}

// Each size below 2 * kBins pages has a bin of its own.
ArenaRanges::Bin ArenaRanges::bin_of(uint64_t size) {
  const uint64_t pages = size / kPage;
  if (pages < kBins) return {0, static_cast<unsigned>(pages)};
  const unsigned shift = static_cast<unsigned>(std::bit_width(pages)) - (kSplit + 1);
  return {shift + 1, static_cast<unsigned>((pages >> shift) - kBins)};
}

void ArenaRanges::add(Range& range) noexcept {
  const Bin bin = bin_of(range.size);
  Range*& first = bins_[bin.level][bin.index];
  range.free = true;
  range.previous = nullptr;
  range.next = first;
  if (first != nullptr) first->previous = &range;
  first = &range;
  filled_[bin.level] |= uint64_t{1} << bin.index;
  levels_ |= uint64_t{1} << bin.level;
}

void ArenaRanges::remove(Range& range) noexcept {
  range.free = false;
  if (range.next != nullptr) range.next->previous = range.previous;
  if (range.previous != nullptr) {
    range.previous->next = range.next;
    return;
  }
  const Bin bin = bin_of(range.size);
  bins_[bin.level][bin.index] = range.next;
  if (range.next != nullptr) {
    __builtin_prefetch(range.next->next, 1);  // the next call writes there
    return;
  }
  filled_[bin.level] &= ~(uint64_t{1} << bin.index);
  if (filled_[bin.level] == 0) levels_ &= ~(uint64_t{1} << bin.level);
}

ArenaRanges::Range* ArenaRanges::find(uint64_t size) const {
  const Bin own = bin_of(size);
  Range* const first = bins_[own.level][own.index];
  Range* range = first;
  for (int tried = 0; tried < kTries && range != nullptr; ++tried, range = range->next) {
    if (range->size >= size) return range;
  }
  const auto from = [](unsigned bit) { return bit < 64 ? ~uint64_t{0} << bit : 0; };
  if (const uint64_t larger = filled_[own.level] & from(own.index + 1); larger != 0)
    return bins_[own.level][static_cast<unsigned>(std::countr_zero(larger))];
  if (const uint64_t levels = levels_ & from(own.level + 1); levels != 0) {
    const auto level = static_cast<unsigned>(std::countr_zero(levels));
    return bins_[level][static_cast<unsigned>(std::countr_zero(filled_[level]))];
  }
  while (range != nullptr && range->size < size) range = range->next;
  return range;
}

ArenaRanges::Range* ArenaRanges::take(uint64_t size) {
  Range* const range = find(size);
  if (range == nullptr) return nullptr;
  Range* const rest = range->size == size ? nullptr : make();
  remove(*range);
  if (rest == nullptr) return range;
  *rest = {.data = range->data + size, .size = range->size - size, .before = range, .after = range->after};
  if (rest->after != nullptr) rest->after->before = rest;
  range->after = rest;
  range->size = size;
  add(*rest);
  return range;
}

void ArenaRanges::give_back(Range* range) noexcept {
  const auto swallow = [this](Range* into, Range* gone) {
    into->size += gone->size;
    into->after = gone->after;
    if (gone->after != nullptr) gone->after->before = into;
    forget(gone);
  };
  if (Range* const after = range->after; after != nullptr && after->free) {
    remove(*after);
    swallow(range, after);
  }
  if (Range* const before = range->before; before != nullptr && before->free) {
    remove(*before);
    swallow(before, range);
    range = before;
  }
  add(*range);
}

}  // namespace torpor
