// One digest for all content of a tag: over its chunks' keys and digests, in order.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/digest.h"
#include "offload/chunk.h"

namespace torpor {

class CombinedDigest {
 public:
  void add(const ChunkKey& key, const Digest& digest) {
    const std::string name = key.to_string();
    all_.update(std::as_bytes(std::span(name)));
    all_.update(std::as_bytes(std::span(digest.bytes)));
  }
  std::string finish() { return all_.finish().hex(); }

 private:
  StreamingDigest all_;
};

inline std::string combined_digest(const std::vector<SavedChunk>& chunks) {
  CombinedDigest all;
  for (const SavedChunk& chunk : chunks) all.add(chunk.key, chunk.digest);
  return all.finish();
}

}  // namespace torpor
