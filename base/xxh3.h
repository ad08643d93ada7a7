// SPDX-License-Identifier: Apache-2.0
// XXH3 (128 bits) with vectors of a fixed width. The library chooses a width at run time only in its shared form, which
// a portable module cannot use. Digests are the same with every width. x86-64 only; elsewhere the library's functions
// are used.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torpor {

struct Xxh3Hash {
  uint64_t low = 0;
  uint64_t high = 0;
};
struct Xxh3 {
  Xxh3Hash (*hash)(const void* bytes, size_t size);
  void (*update)(void* state, const void* bytes, size_t size);  // `state`: an XXH3_state_t
};
extern const Xxh3 kXxh3Avx2;
extern const Xxh3 kXxh3Avx512;

}  // namespace torpor
