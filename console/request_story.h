// SPDX-License-Identifier: Apache-2.0
// RequestStory: everything that the events of one process say about one request, by its name.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "base/status.h"
#include "console/source_events.h"

namespace torpor::console {

// Return an object with `prompt_tokens`, `states`, `hits`, `cached_tokens` (by tier; null until the request has ended),
// `transfers` and `events`, each in order; of `transfers` and `events` only the last `limit`. Times are those of events
// in JSON. kNotFound: no event has this name.
Result<nlohmann::ordered_json> request_story(const SourceEvents& source, const std::string& request, size_t limit);

}  // namespace torpor::console
