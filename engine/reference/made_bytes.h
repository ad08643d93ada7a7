// SPDX-License-Identifier: Apache-2.0
// Bytes that are a function of their position and a seed, for engines that write and compare all their bytes. This file
// is always compiled with optimisation: otherwise a test engine under a sanitizer spends most of its time here.
//
// Threads: any; the functions have no state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace torpor::reference {

// Fill `bytes` with the sequence of `seed`, from its byte number `first` on.
void make_bytes(std::span<std::byte> bytes, uint64_t first, uint64_t seed);
// Return the position of the first byte that make_bytes(bytes, 0, seed) would not have written; bytes.size() if there
// is none.
size_t first_not_made(std::span<const std::byte> bytes, uint64_t seed);
// Return the position of the first byte that is not 0; bytes.size() if there is none.
size_t first_not_zero(std::span<const std::byte> bytes);
// Make `bytes` look like bf16 values, whose exponents lie close together: every second byte, counted from byte number
// `first`, keeps its sign and gets seven bits of the exponent.
void make_like_bf16(std::span<std::byte> bytes, uint64_t first = 0);

}  // namespace torpor::reference
