// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/rank_base.h"

#include <fmt/core.h>

namespace torpor {

Result<std::unique_ptr<RankBase>> RankBase::open(FileSystem& file_system, const RankWriting& writing, int32_t rank,
                                                 std::shared_ptr<const Key> key) {
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint, open_checkpoint(file_system, writing.base, std::move(key)));
  const RankSummary* const summary = checkpoint.manifest().find_rank(rank);
  if (checkpoint.manifest().id != writing.base_id || summary == nullptr) {
    return Error{.code = Code::kIncompatible,
                 .what = fmt::format("{} is not the one that the other processes see there, or has no rank {}",
                                     writing.base, rank),
                 .next_step = "let all of them see the same directory"};
  }
  TORPOR_ASSIGN_OR_RETURN(RankRefs refs, checkpoint.refs(*summary));
  std::unique_ptr<RankBase> base(new RankBase(std::move(refs)));
  for (const SavedChunk& record : base->refs_.records) base->by_key_.emplace(record.key, &record);
  return base;
}

const SavedChunk* RankBase::find(const ChunkKey& key) const {
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? nullptr : found->second;
}

}  // namespace torpor
