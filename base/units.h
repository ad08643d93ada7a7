// SPDX-License-Identifier: Apache-2.0
// Sizes and small arithmetic on them. Every size in torpor is in bytes unless its name says otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>

namespace torpor {

inline constexpr uint64_t kKiB = uint64_t{1} << 10;
inline constexpr uint64_t kMiB = uint64_t{1} << 20;
inline constexpr uint64_t kGiB = uint64_t{1} << 30;

// Direct I/O needs addresses, offsets and lengths that are multiples of this. The arena's spans and the layouts of
// files keep to it.
inline constexpr uint64_t kPage = 4 * kKiB;
// The larger page of x86-64, and of arm64 with 4 KiB pages. Align memory of this size or more to it, so that the system
// may use huge pages.
inline constexpr uint64_t kHugePage = 2 * kMiB;

// Round up to a multiple of `alignment`, a power of two. Precondition: value + alignment does not overflow.
constexpr uint64_t align_up(uint64_t value, uint64_t alignment) { return (value + alignment - 1) & ~(alignment - 1); }
constexpr bool is_aligned(uint64_t value, uint64_t alignment) { return (value & (alignment - 1)) == 0; }
constexpr bool is_power_of_two(uint64_t value) { return value != 0 && (value & (value - 1)) == 0; }

// Add or multiply sizes that come from outside. None: the result would overflow.
constexpr std::optional<uint64_t> checked_add(uint64_t a, uint64_t b) {
  if (b > std::numeric_limits<uint64_t>::max() - a) return std::nullopt;
  return a + b;
}
constexpr std::optional<uint64_t> checked_mul(uint64_t a, uint64_t b) {
  if (a != 0 && b > std::numeric_limits<uint64_t>::max() / a) return std::nullopt;
  return a * b;
}

}  // namespace torpor
