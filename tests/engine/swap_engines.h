// SPDX-License-Identifier: Apache-2.0
// The engines that the tests of a swap use.
#pragma once

#include "base/units.h"
#include "tests/support/test_engine_options.h"

namespace torpor::test {

inline constexpr uint64_t kSwapPageBytes = 64 * kKiB;

// Many pages, most of them without a live block.
inline TestEngineOptions paged(uint64_t weights_seed, int ranks = 1, bool defer_copies = false) {
  TestEngineOptions options{.ranks = ranks, .num_blocks = 2048, .weights_seed = weights_seed};
  options.defer_copies = defer_copies;
  options.handle_bytes = kSwapPageBytes;
  options.bf16 = true;
  options.exchange_asleep = false;
  return options;
}

}  // namespace torpor::test
