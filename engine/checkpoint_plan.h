// SPDX-License-Identifier: Apache-2.0
// CheckpointPlan: all chunks of one rank in a checkpoint, by position, and the source of each. If the checkpoint before
// has a chunk's bytes, its file is linked. If it has not, the chunk is missing, and is copied from device memory.
//
// Owner: one order to a rank. Threads: the caller holds RankMemory's lock.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/rank_writer.h"
#include "engine/rank_orders.h"
#include "engine/region_images.h"
#include "engine/retained_blocks.h"

namespace torpor {

class CheckpointPlan {
 public:
  using BaseRecord = std::function<const SavedChunk*(const ChunkKey&)>;  // returns null if the base has no record

  // Return the plan of the order's tags: ask which of their chunks the base has. No content is read. `contents`: of the
  // order's blocks. kIncompatible: a block does not exist.
  static Result<CheckpointPlan> of(const RegionImages& images, const BaseRecord& in_base, const orders::Save& order,
                                   const std::vector<BlockContent>& contents);
  // Add the tags of orders::Save::carried. The checkpoint gets each of them from the base, or is without it.
  void carry(const BaseRecord& in_base, const orders::Save& order);

  size_t size() const { return chunks_.size(); }
  const ChunkKey& key_at(size_t place) const { return chunks_[place].key; }
  uint64_t bytes_at(size_t place) const;
  uint64_t block_bytes() const { return images_->chunks().block_bytes(); }
  std::vector<SavedChunk>& records() { return records_; }  // by position
  // Return the positions of chunks whose records are taken over from the base. RankWriter::create() has linked their
  // files.
  const std::vector<size_t>& unchanged() const { return unchanged_; }
  std::vector<size_t>& missing() { return missing_; }  // positions of all other chunks
  // Return where the chunks at these positions lie in device memory.
  Result<std::vector<ChunkPlan>> chunks_at(std::span<const size_t> places) const;

  // Fill the records of unchanged positions.
  Status take_over_unchanged(RankWriter& writer);
  // Return the unchanged positions, below `own`, whose records lie in sparse files (RankWriter::sparse()): they are to
  // be written again. If a sparse file has carried records, drop all carried records, as they are never read.
  std::vector<size_t> leave_sparse(RankWriter& writer, size_t own);

 private:
  explicit CheckpointPlan(const RegionImages& images) : images_(&images) {}
  Status add_blocks(const BaseRecord& in_base, const orders::Save& order, const std::vector<BlockContent>& contents);
  bool add_tag(const BaseRecord& in_base, const std::string& tag, bool as_proven);
  void shrink(size_t size);

  const RegionImages* images_;
  // KV blocks have only their key here: there are many, and most are unchanged. chunks_at() finds where they lie.
  std::vector<ChunkPlan> chunks_;
  std::vector<SavedChunk> records_;
  std::vector<size_t> unchanged_;
  std::vector<size_t> missing_;
  std::unordered_map<size_t, uint64_t>
      other_numbers_;  // position -> block number in the base, of unchanged blocks that have another number there
};

}  // namespace torpor
