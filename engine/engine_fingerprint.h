// SPDX-License-Identifier: Apache-2.0
// The fingerprint of an engine: all values that must be equal for tokens to be equal, with the digests of the weights.
//
// Owner: none, these are functions. Threads: that of the operation in progress. Failure: errors are values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/engine_parts.h"

namespace torpor {

enum class WeightsDigest : uint8_t {
  kNone,          // the fingerprint has none
  kRead,          // read the memory of the weights
  kReadOrProven,  // the same, but do not read weights again that were not written since they were read
};

// Return the fingerprint of the engine, with one digest of the weights for each rank.
Result<Fingerprint> fingerprint_of(const EngineParts& engine, const Described& described, WeightsDigest weights);
// Add the digests of the weights that the ranks have named (RankMemory::name_weights). Return false if a rank has named
// none.
Result<bool> add_named_weights(const EngineParts& engine, Fingerprint& fields, bool as_proven);

// Return for each rank how often a write of its weights was seen. Writes of other tags do not count.
std::vector<uint64_t> writes_of_weights(const Described& described);
// Return whether the weights of the ranks, in their order, have these digests. False: a digest is not known.
Result<bool> weights_have_digests(const EngineParts& engine, const Described& described,
                                  const std::vector<std::string>& digests);
// Return whether the tag came back without content on some rank, and was not written since.
bool is_without_content(const Described& described, const std::string& tag);
// Return kFailedPrecondition if any tag is without content: a checkpoint would not have what its tokens depend on.
Status all_have_content(const Described& described);

}  // namespace torpor
