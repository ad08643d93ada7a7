// SPDX-License-Identifier: Apache-2.0
// Compares two recordings to find the cause of a difference: the first event that differs, the states of requests, and
// how long transfers, sleeps and wakes took.
#pragma once

#include <nlohmann/json.hpp>

#include "console/source_events.h"

namespace torpor::console {

// Compare two recordings of one source each. "equal": all events are equal, in all bytes but sequence and time.
// "differences": the figures of a and b side by side, without equal ones.
nlohmann::ordered_json diff_recordings(const SourceEvents& a, const SourceEvents& b);

}  // namespace torpor::console
