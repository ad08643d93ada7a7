// What tests do otherwise under a sanitizer.
#pragma once

#include <cstdint>

namespace torpor::test {

// Tests that fail each call of an operation in turn go from one call to the next by this much. ThreadSanitizer looks at
// what threads do, and is slow where many are started: there every seventh call has to do. Other builds fail each one.
#ifdef __SANITIZE_THREAD__
inline constexpr uint64_t kNextFailure = 7;
#else
inline constexpr uint64_t kNextFailure = 1;
#endif

}  // namespace torpor::test
