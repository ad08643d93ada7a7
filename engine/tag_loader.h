// SPDX-License-Identifier: Apache-2.0
// TagLoader: fills the regions of a tag, the weights of a new process, from a committed checkpoint.
//
// Owner: RankMemory. Threads: the caller holds RankMemory's lock.
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
  uint64_t generation = 0;  // of that checkpoint
  SealId id{};
};
struct LoadedTag {
  uint64_t bytes = 0;
  std::string digest;  // as DigestTags returns it
};

class TagLoader {
 public:
  TagLoader(const RankParts& parts, RegionImages& images) : parts_(parts), images_(images) {}  // both outlive it
  // Copy what a committed checkpoint has of a tag into its attached regions, which must be the same regions. It checks
  // that before it writes. A later failure leaves the tag without content. kIncompatible: the checkpoint has other
  // regions, or nothing of the tag.
  Result<LoadedTag> load(const StoredTag& stored);

 private:
  Status fill(const std::string& tag, std::vector<SavedChunk> chunks, RecordStore& source);

  const RankParts& parts_;
  RegionImages& images_;
};

}  // namespace torpor
