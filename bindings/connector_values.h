// SPDX-License-Identifier: Apache-2.0
// What both sides of vLLM's KV connector tell each other besides plans and reports, and what it tells vLLM.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include <pybind11/pybind11.h>

#include "base/value.h"
#include "kvcache/offload_scheduler.h"

namespace torpor {

struct ConnectorOptions {
  OffloadSchedulerOptions offload;
  PlacementOptions placement;
  bool lazy = false;
  std::chrono::milliseconds remote_wait{0};  // longest that a request waits to hear what the remote store has
  int32_t watermark = 0;                     // lazy: how many of the next blocks to be evicted are looked at
};
ConnectorOptions connector_options_from(const pybind11::dict& dict);

// Blocks that a rank recovered, and the slots under which they are known, as flat records. Raises where they are none.
Bytes packed(const std::vector<RecoveredBlock>& blocks);
Bytes packed(const std::vector<AdoptedBlock>& blocks);
std::vector<RecoveredBlock> recovered_from(const Bytes& bytes);
std::vector<AdoptedBlock> adopted_from(const Bytes& bytes);

// Counters since the beginning, and what there is now: flat, by name.
pybind11::dict connector_stats(const OffloadScheduler& scheduler, int64_t held, int64_t loading);
pybind11::dict times_to_python(const OffloadTimes& times);
// None: there are none.
pybind11::object events_to_python(const BlockEvents& events);

}  // namespace torpor
