// SPDX-License-Identifier: Apache-2.0
// What was read of one process.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/event_ring.h"

namespace torpor::console {

struct SourceEvents {
  EventSource source;
  std::string path;
  bool alive = false;  // its process is there
  bool gone = false;   // its process has ended, and left these events; of a recording nobody knows
  std::vector<Event> events;
  uint64_t lost = 0;     // events of which there is only the number
  uint64_t damaged = 0;  // bytes behind the last whole part of a recording
};

}  // namespace torpor::console
