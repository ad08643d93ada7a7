// SPDX-License-Identifier: Apache-2.0
// SleepingEngine: a test engine with its controller. Also the requests of the controller's tests.
#pragma once

#include "engine/sleep_controller.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/test_engine.h"

namespace torpor::test {

inline constexpr int kSteps = 30;  // until all example requests have ended

inline void add_example_requests(TestEngine& engine) {
  engine.add("a", {1, 2, 3, 4, 5, 6, 7}, 20);
  engine.add("b", {1, 2, 3, 4, 9}, 25, /*seeded=*/false);
  engine.add("c", std::vector<int32_t>(18, 5), 12);
  engine.add("d", {8}, 3, /*seeded=*/false);
}
inline void add_late_request(TestEngine& engine) {
  engine.add("late", {1, 2, 3, 4, 5, 6, 7, 8, 9}, 10);
}  // hits the prefix of "a"

struct SleepingEngine {
  explicit SleepingEngine(FileSystem& file_system, std::string directory, TestEngineOptions options = {},
                          std::optional<uint64_t> kv_budget = {}, EventPort port = {},
                          const Clock& clock = system_clock())
      : engine(file_system, options),
        controller(
            engine, file_system, clock,
            {.directory = std::move(directory),
             .kv_budget_bytes = kv_budget,
             .checkpoints = {.key = options.key, .encrypt = options.key != nullptr, .incremental = options.incremental},
             .always_read_weights = options.always_read_weights,
             .own_threads = options.own_threads},
            port) {}
  TestEngine engine;
  SleepController controller;
};

// Return the tokens of a run that never sleeps. "late" is added after all others have ended.
inline TestEngine::Tokens uninterrupted(TestEngineOptions options = {}) {
  TestEngine engine(linux_file_system(), options);
  add_example_requests(engine);
  engine.run();
  add_late_request(engine);
  engine.run();
  return engine.tokens();
}

// Run an engine to its end, as uninterrupted() does. Return its tokens.
inline TestEngine::Tokens finish(TestEngine& engine) {
  engine.run();
  add_late_request(engine);
  engine.run();
  return engine.tokens();
}

}  // namespace torpor::test
