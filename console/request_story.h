// SPDX-License-Identifier: Apache-2.0
// RequestStory: all that the events of one process say of one request, by its name.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "base/status.h"
#include "console/source_events.h"

namespace torpor::console {

// An object of `prompt_tokens`, `states`, `hits`, `transfers` and `events`, each in order and of the last two the last
// `limit`. Times are those of events as JSON has them. kNotFound: no event has this name.
Result<nlohmann::ordered_json> request_story(const SourceEvents& source, const std::string& request, size_t limit);

}  // namespace torpor::console
