// SPDX-License-Identifier: Apache-2.0
// TransferStory: what became of one candidate, from its events.
#pragma once

#include <cstdint>
#include <set>
#include <span>

#include <nlohmann/json.hpp>

#include "base/event.h"
#include "kvcache/offload_queue.h"

namespace torpor::console {

class TransferStory {
 public:
  explicit TransferStory(uint64_t candidate) : candidate_(candidate) {}
  uint64_t candidate() const { return candidate_; }
  // Take the events of a process in their order; those of other candidates change nothing.
  void take(std::span<const Event> events);
  bool empty() const { return state_ == CandidateState::kNone; }
  bool done() const { return state_ == CandidateState::kCompleted || state_ == CandidateState::kSkipped; }
  nlohmann::ordered_json to_json() const;

 private:
  const uint64_t candidate_;
  CandidateState state_ = CandidateState::kNone;
  uint64_t blocks_ = 0;
  OutcomeCounts ended_{};
  std::set<uint64_t> jobs_;
};

}  // namespace torpor::console
