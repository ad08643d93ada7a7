// SPDX-License-Identifier: Apache-2.0
// A running request for tests of images.
#pragma once

#include <string>
#include <utility>

#include "engine/engine_hooks.h"

namespace torpor::test {

// Return a running request with six prompt tokens and three output tokens, of which `computed` have KV.
inline RequestState running_request(std::string id, int32_t computed) {
  return {.id = std::move(id),
          .status = RequestStatus::kRunning,
          .prompt_token_ids = {1, 2, 3, 4, 5, 6},
          .output_token_ids = {7, 8, 9},
          .num_computed_tokens = computed,
          .max_tokens = 10};
}

}  // namespace torpor::test
