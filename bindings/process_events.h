// The events of this process: one ring, however many engines and ranks it has.
#pragma once

#include <string>

#include "base/event.h"
#include "base/status.h"

namespace torpor {

// From now on what this process does is told in a ring of its own in `directory`; its path. Where that was done before
// it changes nothing. A forked child begins anew.
Result<std::string> begin_process_events(const std::string& directory, const std::string& role, int32_t rank);
// Tells nothing before begin_process_events().
EventPort process_events();

}  // namespace torpor
