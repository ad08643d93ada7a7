// SPDX-License-Identifier: Apache-2.0
// IdleHooks: hooks of an engine without requests, in which each call succeeds and does nothing. An engine of a test or
// a bench overrides those that it needs.
#pragma once

#include <string>
#include <vector>

#include "engine/engine_hooks.h"

namespace torpor {

class IdleHooks : public EngineHooks {
 public:
  Result<std::vector<std::string>> unsupported() override { return std::vector<std::string>{}; }
  Result<int64_t> unfinished_requests() override { return 0; }
  Status quiesce(std::optional<double>) override { return ok(); }
  Status resume() override { return ok(); }
  Result<CapturedState> capture() override { return CapturedState{}; }
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

}  // namespace torpor
