// SPDX-License-Identifier: Apache-2.0
// RequestState: one request as a value, independent of the engine: its parameters, its progress, its sampling.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/value.h"

namespace torpor {

enum class RequestStatus : uint8_t { kWaiting, kRunning, kPreempted };
std::string_view name(RequestStatus status);  // "waiting", "running", "preempted"

// The sampling parameters in force. Names and meanings are those of the OpenAI API and vLLM. `engine` holds every other
// parameter that differs from the engine's default.
struct SamplingState {
  int32_t n = 1;
  double temperature = 1;
  double top_p = 1;
  int32_t top_k = 0;
  double min_p = 0;
  double presence_penalty = 0;
  double frequency_penalty = 0;
  double repetition_penalty = 1;
  std::optional<int64_t> seed;
  std::vector<std::string> stop;
  std::vector<int32_t> stop_token_ids;
  std::optional<int32_t> max_tokens;
  int32_t min_tokens = 0;
  bool ignore_eos = false;
  std::optional<int32_t> logprobs;
  std::optional<int32_t> prompt_logprobs;
  Value engine;
  friend bool operator==(const SamplingState&, const SamplingState&) = default;
};

struct RequestState {
  std::string id;
  int32_t client_index = 0;
  int32_t priority = 0;
  double arrival_time = 0;  // seconds since 1970
  RequestStatus status = RequestStatus::kWaiting;
  std::vector<int32_t> prompt_token_ids;
  std::vector<int32_t> output_token_ids;
  int32_t num_computed_tokens = 0;  // tokens whose KV is in the request's blocks
  int32_t num_preemptions = 0;
  int32_t max_tokens = 0;
  Bytes block_hashes;            // keys of the request's blocks, one after the other
  int32_t block_hash_bytes = 0;  // size of one key; 0: there are none
  std::optional<std::string> cache_salt;
  Value stop_reason;
  SamplingState sampling;
  Value engine;  // data that only the adapter understands, but for fork_ancestry.h

  // Check that lengths, counts and token ids of this request fit each other. kCorruption: the error names the field.
  Status validate() const;
  friend bool operator==(const RequestState&, const RequestState&) = default;
};

}  // namespace torpor
