// SPDX-License-Identifier: Apache-2.0
// TagLoader: fills the regions of a new process with what a committed checkpoint has of a tag, its weights.
//
// Owner: RankMemory; its lock is held at every call.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/seal.h"
#include "engine/rank_parts.h"
#include "engine/region_images.h"

namespace torpor {

// Where the content of a tag is stored.
struct StoredTag {
  std::string tag;
  std::string directory;    // of the checkpoint
  uint64_t generation = 0;  // that it has
  SealId id{};
};
struct LoadedTag {
  uint64_t bytes = 0;
  std::string digest;  // as DigestTags says it
};

class TagLoader {
 public:
  TagLoader(const RankParts& parts, RegionImages& images) : parts_(parts), images_(images) {}  // both outlive it
  // What a committed checkpoint has of a tag -> its attached regions, which must be the same. Nothing is written before
  // that is known; a failure after it leaves the tag without content. kIncompatible: other regions, or nothing of it.
  Result<LoadedTag> load(const StoredTag& stored);

 private:
  Status fill(const std::string& tag, std::vector<SavedChunk> chunks, RecordStore& source);

  const RankParts& parts_;
  RegionImages& images_;
};

}  // namespace torpor
