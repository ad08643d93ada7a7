// SPDX-License-Identifier: Apache-2.0
// RankBase: the records of one rank in the base checkpoint of an incremental one. Only its manifest and refs are read.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "base/file_system.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/refs.h"
#include "offload/disk_tier.h"

namespace torpor {

// How the ranks of one checkpoint write. A value that can be sent to other processes; it does not include the key.
struct RankWriting {
  SealId id{};
  Protection protection = Protection::kNone;
  CompressionOptions compression{.codec = Codec::kNone};
  std::string base;  // path of the base checkpoint; empty: none
  SealId base_id{};  // expected id of the base
};

class RankBase {
 public:
  // Open the base. kIncompatible: another checkpoint is at the path, or it does not have this rank.
  static Result<std::unique_ptr<RankBase>> open(FileSystem& file_system, const RankWriting& writing, int32_t rank,
                                                std::shared_ptr<const Key> key);
  const RankRefs& refs() const { return refs_; }
  const SavedChunk* find(const ChunkKey& key) const;  // null: the base does not have it

 private:
  explicit RankBase(RankRefs refs) : refs_(std::move(refs)) {}
  const RankRefs refs_;
  std::map<ChunkKey, const SavedChunk*> by_key_;
};

}  // namespace torpor
