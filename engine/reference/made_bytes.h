// SPDX-License-Identifier: Apache-2.0
// Bytes that follow from their place and a seed, for engines that write and compare all of theirs. Always compiled with
// optimisation: under a sanitizer a test engine spends most of its time here otherwise.
//
// Threads: any; the functions have no state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace torpor::reference {

// Writes `bytes`, of which the first is number `first` of those that `seed` makes.
void make_bytes(std::span<std::byte> bytes, uint64_t first, uint64_t seed);
// The place in `bytes` of the first byte that is not what make_bytes(bytes, 0, seed) writes; their number if there is
// none.
size_t first_not_made(std::span<const std::byte> bytes, uint64_t seed);
// The place of the first byte that is not 0; their number if there is none.
size_t first_not_zero(std::span<const std::byte> bytes);
// Makes `bytes` like values of type bf16, whose exponents lie close together: every second byte, counted from number
// `first`, keeps its sign and gets seven bits of the exponent.
void make_like_bf16(std::span<std::byte> bytes, uint64_t first = 0);

}  // namespace torpor::reference
