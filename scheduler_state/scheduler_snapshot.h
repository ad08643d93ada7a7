// SPDX-License-Identifier: Apache-2.0
// SchedulerSnapshot: all requests and the queues with their order, as values. WorkerSnapshot: the sampler of one rank.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "scheduler_state/request_state.h"

namespace torpor {

struct SchedulerSnapshot {
  std::string policy;                  // "fcfs" or "priority"
  std::vector<RequestState> requests;  // in the engine's own order
  std::vector<std::string> running;    // in scheduling order
  std::vector<std::string> waiting;    // front first
  std::vector<std::string> held;       // waiting, but with blocks already; front first
  std::vector<std::string> finished;   // ended, but the workers do not know yet
  Value engine;

  // Check that each request is valid, that ids are unique, that every request is in exactly one of running, waiting and
  // held, and that its status fits the queue. kCorruption: the error names the request.
  Status validate() const;
  friend bool operator==(const SchedulerSnapshot&, const SchedulerSnapshot&) = default;
};

// The sampler state of one worker rank: everything on which the next draw depends.
struct WorkerSnapshot {
  int32_t rank = 0;
  std::vector<std::string> rows;                          // ids of requests by row of the batch
  Bytes default_generator;                                // state of the generator that unseeded requests share
  std::vector<std::pair<std::string, Bytes>> generators;  // state of the generator of each seeded request
  Value engine;
  friend bool operator==(const WorkerSnapshot&, const WorkerSnapshot&) = default;
};

}  // namespace torpor
