// SPDX-License-Identifier: Apache-2.0
// What differs between two recordings, as somebody who looks for the cause wants it: the first event that differs, what
// requests went through, how long transfers took, what sleeps and wakes took.
#pragma once

#include <nlohmann/json.hpp>

#include "console/source_events.h"

namespace torpor::console {

// Of one source each. "equal": every event is, all bytes of it but sequence and time. Numbers of a and b side by side;
// those that are equal are left out of "differences".
nlohmann::ordered_json diff_recordings(const SourceEvents& a, const SourceEvents& b);

}  // namespace torpor::console
