// What tests do otherwise under a sanitizer.
#pragma once

#include <cstdint>

namespace torpor::test {

#ifdef __has_feature
inline constexpr bool kThreadSanitizer = __has_feature(thread_sanitizer);
#else
inline constexpr bool kThreadSanitizer = false;
#endif

// Tests that fail each call of an operation in turn go from one call to the next by this much. ThreadSanitizer looks at
// what threads do, and is slow where many are started: there every seventh call has to do. Other builds fail each one.
inline constexpr uint64_t kNextFailure = kThreadSanitizer ? 7 : 1;

}  // namespace torpor::test
