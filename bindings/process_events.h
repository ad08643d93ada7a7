// SPDX-License-Identifier: Apache-2.0
// The events of this process. It has one ring for all its engines and ranks. Threads: any. Failure: errors are values.
#pragma once

#include <string>

#include "base/event.h"
#include "base/status.h"
#include "console/front_access.h"
#include "console/offload_access.h"

namespace torpor {

// From now on write the events of this process into a ring of its own in `directory`; return its path. `blocks`: also
// each state of each block. If there is a ring already, nothing changes. A forked child begins anew.
Result<std::string> begin_process_events(const std::string& directory, const std::string& role, int32_t rank,
                                         bool blocks = false);
// From now on let a console that may read the ring look at this process through a socket, and stop its engine if
// `operates`; return the socket's path. `records`: directory in which the console may begin recordings; empty: nowhere.
// kFailedPrecondition: there is no ring.
Result<std::string> begin_process_control(bool operates, const std::string& records);
// Let consoles use this engine's OffloadScheduler until unserve_offload() returns. Only the one that was served last is
// used. Call both without the interpreter's lock: they wait for a console's call, which may need it.
void serve_offload(console::OffloadAccess& offload);
void unserve_offload(const console::OffloadAccess* offload);  // null: any
// Set what this process answers as an engine's front end; null: nothing any more.
void serve_front(console::FrontAccess* front);
// Return the port of the ring. It drops events before begin_process_events().
EventPort process_events();

}  // namespace torpor
