// SPDX-License-Identifier: Apache-2.0
// One digest for all content of a tag: over the keys and digests of its chunks, sorted by key. So it does not depend on
// the order in which regions were allocated, saved or read.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "offload/chunk.h"

namespace torpor {

class CombinedDigest {
 public:
  void add(const ChunkKey& key, const Digest& digest) { chunks_.emplace_back(key, digest); }
  std::string finish() {
    std::sort(chunks_.begin(), chunks_.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    StreamingDigest all;
    for (const auto& [key, digest] : chunks_) {
      const std::string name = key.to_string();
      all.update(std::as_bytes(std::span(name)));
      all.update(std::as_bytes(std::span(digest.bytes)));
    }
    return all.finish().hex();
  }

 private:
  std::vector<std::pair<ChunkKey, Digest>> chunks_;
};

inline std::string combined_digest(const std::vector<SavedChunk>& chunks) {
  CombinedDigest all;
  for (const SavedChunk& chunk : chunks) all.add(chunk.key, chunk.digest);
  return all.finish();
}

}  // namespace torpor
