// SPDX-License-Identifier: Apache-2.0
// An engine whose tokens depend on every byte, and a controller: what sleep and wake mean (docs/semantics.md).
#pragma once

#include "engine/sleep_controller.h"
#include "tests/support/results.h"
#include "tests/support/sleeping_engine.h"

namespace torpor::test {

inline SleepOptions preserving(bool to_disk) { return {.preserve_state = true, .to_disk = to_disk}; }
inline SleepOptions dropping(int level, std::string in_flight) {
  return {.level = level, .in_flight = std::move(in_flight)};
}

struct SleepVariant {
  int ranks;
  bool defer_copies;
};

class SleepControllerTest : public ::testing::TestWithParam<SleepVariant> {
 protected:
  TestEngineOptions options() const { return {.ranks = GetParam().ranks, .defer_copies = GetParam().defer_copies}; }
  SleepingEngine make(std::optional<uint64_t> kv_budget = {}) {
    return SleepingEngine(linux_file_system(), temporary_.path(), options(), kv_budget);
  }
  TestEngine::Tokens expected() const { return uninterrupted(options()); }
  TemporaryDirectory temporary_;
};

}  // namespace torpor::test
