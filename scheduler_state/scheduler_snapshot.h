// SPDX-License-Identifier: Apache-2.0
// SchedulerSnapshot: all requests and the queues with their order, as values; and the sampler state of each worker.
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
  std::vector<std::string> running;    // in the order in which they are scheduled
  std::vector<std::string> waiting;    // front first
  std::vector<std::string> held;       // waiting with blocks in hand, front first
  std::vector<std::string> finished;   // ended, but the workers have not been told yet
  Value engine;

  // Each request is valid, ids are unique, every request stands in exactly one of running, waiting and held, and its
  // status fits the queue. kCorruption names the request.
  Status validate() const;
  friend bool operator==(const SchedulerSnapshot&, const SchedulerSnapshot&) = default;
};

// The sampler of one worker rank: what the next draw depends on.
struct WorkerSnapshot {
  int32_t rank = 0;
  std::vector<std::string> rows;                          // requests by row of the batch, in row order
  Bytes default_generator;                                // state of the generator that unseeded requests share
  std::vector<std::pair<std::string, Bytes>> generators;  // state of each seeded request's own generator
  Value engine;
  friend bool operator==(const WorkerSnapshot&, const WorkerSnapshot&) = default;
};

}  // namespace torpor
