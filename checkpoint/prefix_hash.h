// SPDX-License-Identifier: Apache-2.0
// PrefixHasher: recomputes the chain of prefix hashes of a request from its tokens, as the engine that wrote the
// checkpoint computed it.
//
// It knows vLLM's "sha256" and "sha256_cbor" (vllm/utils/hashing.py, v1/core/kv_cache_utils.py): SHA-256 over the tuple
// (hash of the previous block, the block's tokens, extra keys), in Python's pickle protocol 5 or in canonical CBOR. The
// predecessor of the first block is the hash of the seed's text.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/value.h"

namespace torpor {

class PrefixHasher {
 public:
  // `described`: the field "prefix_hash" of the fingerprint, "ALGORITHM, seed SEED". Null: the algorithm is unknown.
  static std::unique_ptr<PrefixHasher> of(const std::string& described);
  virtual ~PrefixHasher() = default;
  virtual Bytes first() const = 0;  // the hash before the first block
  // Return the hash of the next block. `salt`: of the request, for its first block only. None: the block is too large
  // to be recomputed here.
  virtual std::optional<Bytes> next(const Bytes& before, std::span<const int32_t> tokens,
                                    const std::optional<std::string>& salt) const = 0;
};

}  // namespace torpor
