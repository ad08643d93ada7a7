// A recording as one web page: slots, tiers and memory at any moment, a track for each request, operation and lane. It
// is a file that holds its events; it loads nothing and asks nobody.
#pragma once

#include <string_view>

namespace torpor::console {

// Before the events, which are lines of JSON, and behind them.
std::string_view event_page_head();
std::string_view event_page_tail();

}  // namespace torpor::console
