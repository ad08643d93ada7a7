// SPDX-License-Identifier: Apache-2.0
// XXH3 in 128 bits with vectors of one width. The library's own choice of the width is only in its shared form, which a
// portable module cannot use. Digests are the same with all. x86-64 only; elsewhere the library's functions serve.
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
  void (*update)(void* state, const void* bytes, size_t size);  // of an XXH3_state_t
};
extern const Xxh3 kXxh3Avx2;
extern const Xxh3 kXxh3Avx512;

}  // namespace torpor
