// SPDX-License-Identifier: Apache-2.0
// Replay: gives a recording of a reference engine (console/reference_run.h) to another one, input by input, and
// compares every event, all 64 bytes. The first event that differs shows where two versions of the code diverge.
#pragma once

#include <cstdint>
#include <optional>

#include "console/reference_run.h"
#include "console/source_events.h"

namespace torpor::console {

struct ReplayDifference {
  size_t at = 0;  // index in the recording's events
  Event recorded;
  std::optional<Event> replayed;  // none: the replay recorded no more
};

struct ReplayResult {
  uint64_t inputs = 0;
  uint64_t events = 0;  // number of equal ones
  std::optional<ReplayDifference> difference;
};

// Replay a recording. It may end in the middle of an input: what the replay records beyond its end is no difference.
// kFailedPrecondition: it cannot be replayed exactly; the error says why: no inputs, lost events,
// threads of its own for transfers, or stops.
Result<ReplayResult> replay(const SourceEvents& recording, RunHost host, uint64_t ring_events = 1 << 16);

}  // namespace torpor::console
