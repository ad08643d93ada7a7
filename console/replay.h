// SPDX-License-Identifier: Apache-2.0
// Replay: a recording of a reference engine (console/reference_run.h) is given to another one, input by input, and
// every event is compared, all 64 bytes. The first that differs is where two versions of the code part ways.
#pragma once

#include <cstdint>
#include <optional>

#include "console/reference_run.h"
#include "console/source_events.h"

namespace torpor::console {

struct ReplayDifference {
  size_t at = 0;                  // of the recording's events
  std::optional<Event> recorded;  // none: the recording has no more
  std::optional<Event> replayed;  // none: the replay told no more
};

struct ReplayResult {
  uint64_t inputs = 0;
  uint64_t events = 0;  // that were equal
  std::optional<ReplayDifference> difference;
};

// kFailedPrecondition: it cannot be replayed exactly, and why: no inputs, events lost, threads of its own, stops.
Result<ReplayResult> replay(const SourceEvents& recording, RunHost host, uint64_t ring_events = 1 << 16);

}  // namespace torpor::console
