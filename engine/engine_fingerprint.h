// SPDX-License-Identifier: Apache-2.0
// The fingerprint of an engine: all that must be equal for tokens to be equal, with the digests of the weights.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/engine_parts.h"

namespace torpor {

enum class WeightsDigest : uint8_t {
  kNone,          // not in the fingerprint
  kRead,          // of what the weights' memory has now
  kReadOrProven,  // the same, but weights that nobody wrote since they were read are not read again
};

// Return the fingerprint of the engine, with one digest of the weights for each rank.
Result<Fingerprint> fingerprint_of(const EngineParts& engine, const Described& described, WeightsDigest weights);
// Add what the ranks have named as their weights (RankMemory::name_weights). False: a rank has named nothing.
Result<bool> add_named_weights(const EngineParts& engine, Fingerprint& fields, bool as_proven);

// Return how often each rank's weights were seen to be written; other tags are no weights, whoever writes them.
std::vector<uint64_t> writes_of_weights(const Described& described);
// Return whether the tag came back without content on some rank, and was not written since.
bool is_without_content(const Described& described, const std::string& tag);
// Return kFailedPrecondition if any tag did: a checkpoint would not say what its tokens come from.
Status all_have_content(const Described& described);

}  // namespace torpor
