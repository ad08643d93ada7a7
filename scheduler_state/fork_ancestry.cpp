// SPDX-License-Identifier: Apache-2.0
#include "scheduler_state/fork_ancestry.h"

#include <fmt/core.h>

namespace torpor {

Result<std::vector<ForkStep>> fork_ancestry(const RequestState& request) {
  std::vector<ForkStep> steps;
  const Value* const entry = request.engine.find(kForkedField);
  if (entry == nullptr) return steps;
  const auto wrong = [&] {
    return Error{.code = Code::kCorruption,
                 .what = fmt::format("request {}: {} is no list of forks", request.id, kForkedField),
                 .next_step = "use another checkpoint"};
  };
  const auto* const list = std::get_if<List>(&entry->data);
  if (list == nullptr || list->size() > kMostForkSteps) return wrong();
  for (const Value& step : *list) {
    const Value* const parent = step.find("request");
    const Value* const at = step.find("at");
    const auto* const id = parent == nullptr ? nullptr : std::get_if<std::string>(&parent->data);
    const auto* const tokens = at == nullptr ? nullptr : std::get_if<int64_t>(&at->data);
    if (id == nullptr || id->empty() || tokens == nullptr || *tokens < 0) return wrong();
    steps.push_back({.request = *id, .at = *tokens});
  }
  return steps;
}

}  // namespace torpor
