// SPDX-License-Identifier: Apache-2.0
// The events that were read of one process.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/event_ring.h"

namespace torpor::console {

struct SourceEvents {
  EventSource source;
  std::string path;
  bool alive = false;  // its process lives
  bool gone = false;   // its process has ended and left these events; false for a recording, where that is unknown
  std::vector<Event> events;
  uint64_t lost = 0;     // number of missing events
  uint64_t damaged = 0;  // bytes after the last intact part of a recording
};

}  // namespace torpor::console
