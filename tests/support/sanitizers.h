// SPDX-License-Identifier: Apache-2.0
// How tests differ under a sanitizer.
#pragma once

#include <cstdint>

#include "tests/support/long_run.h"

namespace torpor::test {

#ifdef __has_feature
inline constexpr bool kThreadSanitizer = __has_feature(thread_sanitizer);
inline constexpr bool kAddressSanitizer = __has_feature(address_sanitizer);
#else
inline constexpr bool kThreadSanitizer = false;
inline constexpr bool kAddressSanitizer = false;
#endif

// The step of tests that fail each call of an operation in turn: 1 without a sanitizer and in `tools/dev proof`.
// Sanitizers check memory and threads, and slow such tests down by a factor of 5 to 20.
inline uint64_t next_failure() {
  static const uint64_t step = long_run() ? 1 : kThreadSanitizer ? 13 : kAddressSanitizer ? 11 : 1;
  return step;
}

// The step of tests of many similar cases: 3 with a sanitizer.
inline int next_case() {
  static const int step = long_run() ? 1 : kThreadSanitizer || kAddressSanitizer ? 3 : 1;
  return step;
}

}  // namespace torpor::test
