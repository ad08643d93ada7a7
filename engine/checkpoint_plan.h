// SPDX-License-Identifier: Apache-2.0
// CheckpointPlan: all chunks that a checkpoint has of a rank, by place, and where the bytes of each come from: the
// checkpoint before has them, and its file is linked; or they are missing, and are copied from device memory.
//
// Owner: one order to a rank. Threads: RankMemory's lock is held at every call.
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
  using BaseRecord = std::function<const SavedChunk*(const ChunkKey&)>;  // null: the base has none

  // Ask which chunks of the order's tags the base has. Nothing of the content is read. `contents`: of the order's
  // blocks. kIncompatible: a block that does not exist.
  static Result<CheckpointPlan> of(const RegionImages& images, const BaseRecord& in_base, const orders::Save& order,
                                   const std::vector<BlockContent>& contents);
  // Add tags that the checkpoint need not have (orders::Save::carried): each as the base has it, or not at all.
  void carry(const BaseRecord& in_base, const orders::Save& order);

  size_t size() const { return chunks_.size(); }
  const ChunkKey& key_at(size_t place) const { return chunks_[place].key; }
  uint64_t bytes_at(size_t place) const;
  uint64_t block_bytes() const { return images_->chunks().block_bytes(); }
  std::vector<SavedChunk>& records() { return records_; }  // of each place
  // Places that the base has: its record is taken over. The writer has linked its file before
  // (RankWriter::create()).
  const std::vector<size_t>& unchanged() const { return unchanged_; }
  std::vector<size_t>& missing() { return missing_; }  // and those that it has not
  // Return where the chunks at these places lie in device memory.
  Result<std::vector<ChunkPlan>> chunks_at(std::span<const size_t> places) const;

  // Fill the records of unchanged places.
  Status take_over_unchanged(RankWriter& writer);
  // Return the places, of the first `own`, whose records are to be written again, because they lie in sparse
  // files (RankWriter::sparse()). If a sparse file has carried records, drop all that is carried: it is never read.
  std::vector<size_t> leave_sparse(RankWriter& writer, size_t own);

 private:
  explicit CheckpointPlan(const RegionImages& images) : images_(&images) {}
  Status add_blocks(const BaseRecord& in_base, const orders::Save& order, const std::vector<BlockContent>& contents);
  bool add_tag(const BaseRecord& in_base, const std::string& tag, bool as_proven);
  void shrink(size_t size);

  const RegionImages* images_;
  // Of KV blocks the key alone: there are many, and most of them are unchanged. Where the rest lie, chunks_at() says.
  std::vector<ChunkPlan> chunks_;
  std::vector<SavedChunk> records_;
  std::vector<size_t> unchanged_;
  std::vector<size_t> missing_;
  std::unordered_map<size_t, uint64_t>
      other_numbers_;  // of unchanged_: KV blocks that the base has under another number
};

}  // namespace torpor
