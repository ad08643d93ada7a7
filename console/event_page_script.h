// SPDX-License-Identifier: Apache-2.0
// The script of the pages of event_page.h, in the order in which they have its parts.
#pragma once

#include <string_view>

namespace torpor::console {

extern const std::string_view kPageFolds;    // what was so at a moment, from events
extern const std::string_view kPageDraws;    // that, in the page
extern const std::string_view kPageFollows;  // asks a server for new events

}  // namespace torpor::console
