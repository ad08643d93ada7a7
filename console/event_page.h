// SPDX-License-Identifier: Apache-2.0
// A recording as one web page: slots, tiers and memory at any moment, a track for each request, operation and lane. It
// is a file that holds its events; it loads nothing and asks nobody. And the same for an engine that runs: a page that
// asks the server it comes from (POST console/events), which says by its header that it may ask nobody else.
#pragma once

#include <string>

namespace torpor::console {

// Before the events, which are lines of JSON, and behind them.
std::string event_page_head();
std::string event_page_tail();
std::string live_page();

}  // namespace torpor::console
