// SPDX-License-Identifier: Apache-2.0
// BlockPolicy: a policy of a user's own, asked about batches of blocks after Placement: which of those that are about
// to be stored are stored, and which of those that were found for a request are loaded.
//
// Threads: the scheduler's, which waits for the answer. An implementation has a bound on its time.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "offload/block_key.h"

namespace torpor {

enum class PolicyQuestion : uint8_t { kStore, kLoad };

class BlockPolicy {
 public:
  // Set keep[i] to 0 for each block i that is not wanted; all are 1 before. Return false if there is no answer: then
  // all are kept. `request`: its id; empty: the blocks belong to no one request.
  virtual bool choose(PolicyQuestion question, std::string_view request, std::span<const BlockKey> keys,
                      std::span<uint8_t> keep) = 0;

 protected:
  ~BlockPolicy() = default;
};

}  // namespace torpor
