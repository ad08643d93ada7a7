// SPDX-License-Identifier: Apache-2.0
#include "console/transfer_story.h"

#include <algorithm>

namespace torpor::console {

void TransferStory::take(std::span<const Event> events) {
  for (const Event& event : events) {
    if (event.transfer != candidate_) continue;
    switch (event.type) {
      case EventType::kCandidate:
        if (event.to >= kCandidateStates) break;
        state_ = static_cast<CandidateState>(event.to);
        blocks_ = std::max(blocks_, event.a);  // at its end all that were offered, before it those that are queued
        break;
      case EventType::kEnded:
        if (event.to < kBlockOutcomes) ended_[event.to] += event.a;
        break;
      case EventType::kPlanned: jobs_.insert(event.a); break;
      default: break;  // another kind of event has another kind of number there
    }
  }
}

nlohmann::ordered_json TransferStory::to_json() const {
  using Json = nlohmann::ordered_json;
  const uint64_t way = candidate_ >> 48;
  Json ended = Json::object();
  for (size_t i = 0; i < ended_.size(); ++i) {
    if (ended_[i] > 0) ended[std::string(name(static_cast<BlockOutcome>(i)))] = ended_[i];
  }
  return {{"candidate", candidate_},
          {"way", way < kWays ? Json(name(static_cast<Way>(way))) : Json()},
          {"done", done()},
          {"state", name(state_)},
          {"blocks", blocks_},
          {"ended_blocks", std::move(ended)},
          {"jobs", jobs_}};
}

}  // namespace torpor::console
