// SPDX-License-Identifier: Apache-2.0
#include "engine/checkpoint_plan.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include "engine/combined_digest.h"
#include "engine/tags.h"

namespace torpor {

Result<CheckpointPlan> CheckpointPlan::of(const RegionImages& images, const BaseRecord& in_base,
                                          const orders::Save& order, const std::vector<BlockContent>& contents) {
  CheckpointPlan plan(images);
  for (const std::string& tag : order.tags) {
    if (images.is_kv(tag)) {
      TORPOR_RETURN_IF_ERROR(plan.add_blocks(in_base, order, contents));
    } else {
      plan.add_tag(in_base, tag, order.as_proven);
    }
  }
  return plan;
}

void CheckpointPlan::carry(const BaseRecord& in_base, const orders::Save& order) {
  for (const std::string& tag : order.carried) {
    const size_t before = size();
    if (!add_tag(in_base, tag, order.as_proven)) shrink(before);
  }
}

Status CheckpointPlan::add_blocks(const BaseRecord& in_base, const orders::Save& order,
                                  const std::vector<BlockContent>& contents) {
  chunks_.reserve(chunks_.size() + order.blocks.size());
  for (size_t i = 0; i < order.blocks.size(); ++i) {
    const size_t place = chunks_.size();
    TORPOR_ASSIGN_OR_RETURN(ChunkKey key, images_->chunks().key_of(order.blocks[i]));
    const std::optional<uint64_t> number =
        images_->index().checkpoints().find(order.writing.base_id, order.blocks[i], contents[i]);
    ChunkKey there = key;
    there.index = number.value_or(key.index);
    const SavedChunk* const known = number ? in_base(there) : nullptr;
    // A seal binds the block's number. Under another number the bytes are written again.
    const bool linked =
        known != nullptr && known->bytes == block_bytes() && (there.index == key.index || known->seal == SealTag{});
    (linked ? unchanged_ : missing_).push_back(place);
    if (linked && there.index != key.index) other_numbers_.emplace(place, there.index);
    chunks_.push_back({.key = std::move(key), .pieces = {}});
  }
  records_.resize(size());
  return ok();
}

// Link all pieces of the tag if the digests in the base, combined, are the known digest of the tag; otherwise none.
// Only of weights it is known when they were written. Return whether the pieces are linked.
bool CheckpointPlan::add_tag(const BaseRecord& in_base, const std::string& tag, bool as_proven) {
  const size_t first = size();
  std::vector<ChunkPlan> chunks = images_->chunks().of_tag(tag);
  std::move(chunks.begin(), chunks.end(), std::back_inserter(chunks_));
  records_.resize(size());
  const bool believed = as_proven && tag == kWeightsTag;
  const std::optional<std::string> proven = believed ? images_->index().digest(tag) : std::nullopt;
  CombinedDigest there;
  bool same = proven.has_value();
  for (size_t i = first; i < size() && same; ++i) {
    const SavedChunk* const known = in_base(chunks_[i].key);
    same = known != nullptr && known->bytes == chunks_[i].bytes();
    if (same) there.add(known->key, known->digest);
  }
  same = same && there.finish() == proven;
  for (size_t i = first; i < size(); ++i) (same ? unchanged_ : missing_).push_back(i);
  return same || first == size();
}

uint64_t CheckpointPlan::bytes_at(size_t place) const {
  const ChunkPlan& chunk = chunks_[place];
  return chunk.key.kind == ChunkKind::kKvBlock ? block_bytes() : chunk.bytes();
}

Result<std::vector<ChunkPlan>> CheckpointPlan::chunks_at(std::span<const size_t> places) const {
  std::vector<ChunkPlan> found;
  found.reserve(places.size());
  for (const size_t place : places) {
    const ChunkPlan& chunk = chunks_[place];
    if (chunk.key.kind != ChunkKind::kKvBlock) {
      found.push_back(chunk);
      continue;
    }
    const auto block = static_cast<int32_t>(chunk.key.index);
    TORPOR_ASSIGN_OR_RETURN(std::vector<ChunkPlan> whole, images_->chunks().of_blocks({&block, 1}));
    found.push_back(std::move(whole.front()));
  }
  return found;
}

Status CheckpointPlan::take_over_unchanged(RankWriter& writer) {
  for (const size_t place : unchanged_) {
    ChunkKey there = chunks_[place].key;
    if (const auto other = other_numbers_.find(place); other != other_numbers_.end()) there.index = other->second;
    TORPOR_ASSIGN_OR_RETURN(records_[place], writer.take_over(there));
    records_[place].key = chunks_[place].key;
  }
  return ok();
}

std::vector<size_t> CheckpointPlan::leave_sparse(RankWriter& writer, size_t own) {
  std::vector<size_t> sparse = writer.sparse(records_);
  if (std::any_of(sparse.begin(), sparse.end(), [own](size_t place) { return place >= own; })) {
    shrink(own);
    std::erase_if(sparse, [own](size_t place) { return place >= own; });
  }
  return sparse;
}

void CheckpointPlan::shrink(size_t size) {
  chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(size), chunks_.end());
  records_.resize(size);
  for (std::vector<size_t>* const places : {&unchanged_, &missing_})
    std::erase_if(*places, [size](size_t place) { return place >= size; });
}

}  // namespace torpor
