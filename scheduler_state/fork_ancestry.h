// SPDX-License-Identifier: Apache-2.0
// Which requests a request was forked from (engine/forks.h). The adapter keeps it with the request, in
// RequestState::engine, wherever the request goes; a request that was not forked has nothing there.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "scheduler_state/request_state.h"

namespace torpor {

// The entry of RequestState::engine: a list of dicts with "request" and "at".
inline constexpr std::string_view kForkedField = "torpor_forked";
inline constexpr size_t kMostForkSteps = 1000;

struct ForkStep {
  std::string request;  // id of the request that was forked
  int64_t at = 0;       // number of its output tokens that the child began with
  friend bool operator==(const ForkStep&, const ForkStep&) = default;
};

// Return the forks that led to a request: first of the request that no fork made, last of its parent; of longer
// ancestries the last kMostForkSteps. kCorruption: the entry is no such list, or has more.
Result<std::vector<ForkStep>> fork_ancestry(const RequestState& request);

}  // namespace torpor
