// SPDX-License-Identifier: Apache-2.0
// What the tests of failures share: an engine that sleeps, on a file system that fails on command.
#pragma once

#include "base/units.h"
#include "tests/support/results.h"
#include "tests/support/sleeping_engine.h"

namespace torpor {

class SleepFailure : public ::testing::Test {
 protected:
  test::SleepingEngine make(test::TestEngineOptions options = {}) {
    return test::SleepingEngine(file_system_, temporary_.path(), options);
  }
  static void begin(test::TestEngine& engine, int steps = 6) {
    test::add_example_requests(engine);
    for (int i = 0; i < steps; ++i) engine.step();
  }
  static uint64_t room_for_weights_only() {  // and the runtime, with what is lost between its pieces
    uint64_t bytes = 0;
    for (const uint64_t all : {test::kWeightBytes, test::kRuntimeBytes}) {
      for (const uint64_t size : reference::random_sizes(all, test::TestEngineOptions{}.regions, 1))
        bytes += align_up(size, kPage);
    }
    return bytes + 16 * kKiB;
  }
  static SleepOptions to_host() { return {.preserve_state = true}; }
  static SleepOptions to_disk() { return {.preserve_state = true, .to_disk = true}; }
  // It serves on as if nothing had been asked.
  static void expect_untouched(test::SleepingEngine& slept, const test::TestEngineOptions& options = {}) {
    EXPECT_FALSE(slept.controller.is_sleeping());
    EXPECT_FALSE(slept.engine.frozen());
    EXPECT_EQ(test::finish(slept.engine), test::uninterrupted(options));
    EXPECT_EQ(slept.engine.recomputed(), 0);
  }
  std::string written_checkpoint(test::TestEngineOptions options = {}) {
    test::SleepingEngine slept = make(options);
    begin(slept.engine);
    return test::value_of(slept.controller.sleep(to_disk())).checkpoint;
  }
  test::TemporaryDirectory temporary_;
  test::FaultyFileSystem file_system_;
};

}  // namespace torpor
