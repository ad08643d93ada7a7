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

// What direct I/O wants addresses, offsets and lengths to be multiples of; the arena's spans and the files' layouts
// keep to it.
inline constexpr uint64_t kPage = 4 * kKiB;
// The larger page of x86-64 and of arm64 with 4 KiB pages; what is as large keeps to it, so that the system may use
// them.
inline constexpr uint64_t kHugePage = 2 * kMiB;

// `alignment` is a power of two. Precondition: value + alignment does not overflow.
constexpr uint64_t align_up(uint64_t value, uint64_t alignment) { return (value + alignment - 1) & ~(alignment - 1); }
constexpr bool is_aligned(uint64_t value, uint64_t alignment) { return (value & (alignment - 1)) == 0; }
constexpr bool is_power_of_two(uint64_t value) { return value != 0 && (value & (value - 1)) == 0; }

// Sums and products of sizes that come from outside: no value where they would wrap.
constexpr std::optional<uint64_t> checked_add(uint64_t a, uint64_t b) {
  if (b > std::numeric_limits<uint64_t>::max() - a) return std::nullopt;
  return a + b;
}
constexpr std::optional<uint64_t> checked_mul(uint64_t a, uint64_t b) {
  if (a != 0 && b > std::numeric_limits<uint64_t>::max() / a) return std::nullopt;
  return a * b;
}

}  // namespace torpor
