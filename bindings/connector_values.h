// SPDX-License-Identifier: Apache-2.0
// What the two sides of vLLM's KV connector send each other besides plans and reports, and what they return to vLLM.
//
// Threads: those that hold the interpreter's lock. Failure: the functions raise the exceptions of torpor.errors.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include <pybind11/pybind11.h>

#include "base/value.h"
#include "bindings/engine_prefixes.h"
#include "kvcache/offload_scheduler.h"
#include "kvcache/residency.h"

namespace torpor {

struct ConnectorOptions {
  OffloadSchedulerOptions offload;
  PlacementOptions placement;
  ResidencyOptions residency;  // `groups` is the engine's
  bool lazy = false;
  std::chrono::milliseconds remote_wait{0};  // longest time that a request waits for the remote store's lookup
  int64_t unit_tokens = 0;                   // of ConnectorHits
  int64_t stride_tokens = 0;                 // of ConnectorHits; no block has more; offload.block_tokens is the same
  bool partial_hits = false;                 // of ConnectorHits
  bool drop_last_block = false;  // of each hit: what an engine's drafting model wrote there is computed anew
  int64_t sync_load_blocks = 0;  // most that loads within one step have together; 0: there are none
  int32_t watermark = 0;         // lazy: number of blocks at the head of the free queue that are looked at
};
ConnectorOptions connector_options_from(const pybind11::dict& dict);

// Encode and decode the blocks that a rank recovered, and the slots under which they were adopted, as flat records.
// Decoding raises if the bytes are not such records.
Bytes packed(const std::vector<RecoveredBlock>& blocks);
Bytes packed(const std::vector<AdoptedBlock>& blocks);
std::vector<RecoveredBlock> recovered_from(const Bytes& bytes);
std::vector<AdoptedBlock> adopted_from(const Bytes& bytes);

// Return counters since the start, and present numbers, by name.
pybind11::dict connector_stats(const OffloadScheduler& scheduler, const Residency& residency, int64_t held,
                               int64_t loading);
// Return the call that a front end makes. Raises InvalidArgument for a verb or tier that does not exist.
SessionCall session_call_from(const pybind11::dict& dict);
pybind11::dict answer_to_python(const SessionAnswer& answer);
// Return {"sessions": […], "next": …}; `next` is what cursor_from() takes, or None.
pybind11::dict page_to_python(const SessionPage& page);
// Return where a list of sessions goes on; None: at its beginning.
SessionCursor cursor_from(const pybind11::object& object);
pybind11::dict times_to_python(const OffloadTimes& times);
// Return None if there are no events. `entered`: blocks that were loaded to the device for no request.
pybind11::object events_to_python(const BlockEvents& events, const std::vector<EnginePrefixes::Entered>& entered);

}  // namespace torpor
