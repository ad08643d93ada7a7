// SPDX-License-Identifier: Apache-2.0
#include "scheduler_state/scheduler_snapshot.h"

#include <cmath>
#include <functional>

#include "tests/support/example_state.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

SchedulerSnapshot example() { return test::example_checkpoint().state.scheduler; }

TEST(SchedulerSnapshot, AConsistentOneIsValid) { EXPECT_SUCCEEDS(example().validate()); }

TEST(SchedulerSnapshot, EachContradictionIsFound) {
  struct Case {
    const char* part;
    std::function<void(SchedulerSnapshot&)> damage;
  };
  const Case cases[] = {
      {"policy", [](auto& s) { s.policy = "lottery"; }},
      {"run is listed twice", [](auto& s) { s.requests[1].id = "run"; }},
      {"not a request", [](auto& s) { s.running = {"nobody"}; }},
      {"in two places", [](auto& s) { s.waiting.push_back("wait"); }},
      {"in two places", [](auto& s) { s.held.push_back("wait"); }},
      {"in no queue", [](auto& s) { s.waiting.clear(); }},
      {"running queue", [](auto& s) { s.requests[0].status = RequestStatus::kWaiting; }},
      {"waiting queue", [](auto& s) { s.requests[1].status = RequestStatus::kRunning; }},
      {"id is empty", [](auto& s) { s.requests[1].id = ""; }},
      {"no prompt", [](auto& s) { s.requests[0].prompt_token_ids.clear(); }},
      {"num_computed_tokens is 8", [](auto& s) { s.requests[0].num_computed_tokens = 8; }},
      {"num_computed_tokens is -1", [](auto& s) { s.requests[0].num_computed_tokens = -1; }},
      {"num_preemptions", [](auto& s) { s.requests[0].num_preemptions = -1; }},
      {"max_tokens is 1", [](auto& s) { s.requests[0].max_tokens = 1; }},
      {"token id", [](auto& s) { s.requests[0].output_token_ids[1] = -5; }},
      {"block hashes", [](auto& s) { s.requests[0].block_hash_bytes = 3; }},
      {"block hashes", [](auto& s) { s.requests[0].block_hash_bytes = 0; }},
      {"finite", [](auto& s) { s.requests[0].sampling.temperature = NAN; }},
  };
  for (const Case& c : cases) {
    SchedulerSnapshot snapshot = example();
    c.damage(snapshot);
    EXPECT_FAILS(snapshot.validate(), Code::kCorruption, c.part);
  }
}

}  // namespace
}  // namespace torpor
