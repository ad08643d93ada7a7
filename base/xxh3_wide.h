// SPDX-License-Identifier: Apache-2.0
// Code of xxh3_avx2.cpp and xxh3_avx512.cpp, which differ only in their compiler flags. It includes nothing but static
// functions: code that is compiled here must not run on other machines.
#pragma once

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/xxh3.h"

namespace torpor {
namespace {

Xxh3Hash hash_wide(const void* bytes, size_t size) {
  const XXH128_hash_t hash = XXH3_128bits(bytes, size);
  return {hash.low64, hash.high64};
}

void update_wide(void* state, const void* bytes, size_t size) {
  (void)XXH3_128bits_update(static_cast<XXH3_state_t*>(state), bytes, size);
}

}  // namespace
}  // namespace torpor
