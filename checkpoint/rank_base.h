// SPDX-License-Identifier: Apache-2.0
// RankBase: what one rank has in the checkpoint that another one is built on. Only its manifest and refs are read.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "base/file_system.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/refs.h"
#include "offload/disk_tier.h"

namespace torpor {

// How the ranks of one checkpoint write. A value, so that it can go to other processes; the key cannot.
struct RankWriting {
  SealId id{};
  Protection protection = Protection::kNone;
  CompressionOptions compression{.codec = Codec::kNone};
  std::string base;  // path of the base checkpoint; empty: there is none
  SealId base_id{};  // that it must have
};

class RankBase {
 public:
  // kIncompatible: another checkpoint is there, or one without this rank.
  static Result<std::unique_ptr<RankBase>> open(FileSystem& file_system, const RankWriting& writing, int32_t rank,
                                                std::shared_ptr<const Key> key);
  const RankRefs& refs() const { return refs_; }
  const SavedChunk* find(const ChunkKey& key) const;  // null: it does not have it

 private:
  explicit RankBase(RankRefs refs) : refs_(std::move(refs)) {}
  const RankRefs refs_;
  std::map<ChunkKey, const SavedChunk*> by_key_;
};

}  // namespace torpor
