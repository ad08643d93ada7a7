// SPDX-License-Identifier: Apache-2.0
// IdleHooks: the hooks of an engine without requests, for tests in which only orders go to the ranks.
#pragma once

#include <string>
#include <vector>

#include "engine/engine_hooks.h"

namespace torpor::test {

class IdleHooks : public EngineHooks {
 public:
  Result<std::vector<std::string>> unsupported() override { return std::vector<std::string>{}; }
  Result<int64_t> unfinished_requests() override { return 0; }
  Status quiesce(std::optional<double>) override { return ok(); }
  Status resume() override { return ok(); }
  Result<SchedulerCheckpoint> capture() override { return SchedulerCheckpoint{}; }
  Result<Fingerprint> fingerprint() override { return Fingerprint{}; }
  Status drop_requests(const std::string&) override { return ok(); }
  Status drop_prefix(const std::vector<int32_t>&) override { return ok(); }
  Status retire_prefix() override { return ok(); }
  Status release_derived() override { return ok(); }
  Status rebuild_derived() override { return ok(); }
  Status reconnect(const std::vector<WorkerSnapshot>&) override { return ok(); }
  Result<std::vector<FailedRequest>> restore(const EngineCheckpoint&) override { return std::vector<FailedRequest>{}; }
  Status forget_restored() override { return ok(); }
};

// Return a running request with six prompt tokens and three output tokens, of which `computed` have KV.
inline RequestState running_request(std::string id, int32_t computed) {
  return {.id = std::move(id),
          .status = RequestStatus::kRunning,
          .prompt_token_ids = {1, 2, 3, 4, 5, 6},
          .output_token_ids = {7, 8, 9},
          .num_computed_tokens = computed,
          .max_tokens = 10};
}

}  // namespace torpor::test
