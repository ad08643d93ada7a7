// SPDX-License-Identifier: Apache-2.0
// The events of this process: one ring, however many engines and ranks it has.
#pragma once

#include <string>

#include "base/event.h"
#include "base/status.h"
#include "console/front_access.h"
#include "console/offload_access.h"

namespace torpor {

// From now on what this process does is told in a ring of its own in `directory`; its path. Where that was done before
// it changes nothing. A forked child begins anew.
Result<std::string> begin_process_events(const std::string& directory, const std::string& role, int32_t rank);
// From now on who may read them can look at this process through a socket, and stop its engine if it `operates`; its
// path. kFailedPrecondition: it tells no events. `records`: where they may begin recordings; empty: nowhere.
Result<std::string> begin_process_control(bool operates, const std::string& records);
// Who looks at this process through its socket may use this engine's OffloadScheduler, until unserve() returns. One at
// a time: the last one. Both without the interpreter's lock: they wait for a call that may want it.
void serve_offload(console::OffloadAccess& offload);
void unserve_offload(const console::OffloadAccess* offload);  // null: whoever it is
// The same of what this process can do as an engine's front end; null: nothing any more.
void serve_front(console::FrontAccess* front);
// Tells nothing before begin_process_events().
EventPort process_events();

}  // namespace torpor
