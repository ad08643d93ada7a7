// SPDX-License-Identifier: Apache-2.0
// Web pages: slots, tiers and memory at any moment, and a track for each request, operation and lane. The page of a
// recording is one file with its events; it loads nothing and makes no request. The page of a live engine asks the
// server that it comes from (POST console/events); the server's header forbids it to ask any other.
#pragma once

#include <string>

namespace torpor::console {

// The parts of a recording's page before and after its events, which are lines of JSON.
std::string event_page_head();
std::string event_page_tail();
std::string live_page();

}  // namespace torpor::console
