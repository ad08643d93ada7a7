// SPDX-License-Identifier: Apache-2.0
#include "scheduler_state/request_state.h"

#include <algorithm>
#include <cmath>

#include <fmt/core.h>

namespace torpor {

std::string_view name(RequestStatus status) {
  switch (status) {
    case RequestStatus::kWaiting: return "waiting";
    case RequestStatus::kRunning: return "running";
    case RequestStatus::kPreempted: return "preempted";
  }
  return "waiting";
}

Status RequestState::validate() const {
  const auto wrong = [this](std::string what) {
    return Error{.code = Code::kCorruption,
                 .what = fmt::format("request {}: {}", id, what),
                 .next_step = "use another checkpoint"};
  };
  if (id.empty()) return wrong("its id is empty");
  if (prompt_token_ids.empty()) return wrong("it has no prompt tokens");
  const auto tokens = static_cast<int64_t>(prompt_token_ids.size() + output_token_ids.size());
  if (num_computed_tokens < 0 || num_computed_tokens > tokens) {
    return wrong(fmt::format("num_computed_tokens is {}, it has {} tokens", num_computed_tokens, tokens));
  }
  if (num_preemptions < 0) return wrong(fmt::format("num_preemptions is {}", num_preemptions));
  if (static_cast<int64_t>(output_token_ids.size()) > max_tokens) {
    return wrong(fmt::format("it has {} output tokens, max_tokens is {}", output_token_ids.size(), max_tokens));
  }
  const auto negative = [](int32_t token) { return token < 0; };
  if (std::any_of(prompt_token_ids.begin(), prompt_token_ids.end(), negative) ||
      std::any_of(output_token_ids.begin(), output_token_ids.end(), negative)) {
    return wrong("a token id is negative");
  }
  if (block_hash_bytes < 0 || (block_hash_bytes == 0) != block_hashes.empty() ||
      (block_hash_bytes > 0 && block_hashes.size() % static_cast<size_t>(block_hash_bytes) != 0)) {
    return wrong(fmt::format("{} bytes of block hashes of {} bytes each", block_hashes.size(), block_hash_bytes));
  }
  for (const double value : {arrival_time, sampling.temperature, sampling.top_p, sampling.min_p,
                             sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty}) {
    if (!std::isfinite(value)) return wrong("a number is not finite");
  }
  return ok();
}

}  // namespace torpor
