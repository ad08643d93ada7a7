// SPDX-License-Identifier: Apache-2.0
#include "engine/rank_checkpoint.h"

#include <fmt/core.h>

#include "base/host_name.h"

namespace torpor {
namespace {

constexpr const char* kHaveItThere =
    "let the hosts of all ranks share the directory, or copy or pull the checkpoint to the same path on each";

}  // namespace

Result<Checkpoint> open_same(const RankParts& parts, const std::string& path, uint64_t generation, const SealId& id) {
  Result<Checkpoint> checkpoint = open_checkpoint(parts.file_system, path, parts.key);
  if (!checkpoint && checkpoint.error().code == Code::kNotFound) {
    return Error{.code = Code::kNotFound,
                 .what = fmt::format("the host {} has no checkpoint at {}", host_name(), path),
                 .next_step = kHaveItThere};
  }
  if (!checkpoint || (checkpoint->manifest().generation == generation && checkpoint->manifest().id == id))
    return checkpoint;
  return Error{.code = Code::kIncompatible,
               .what = fmt::format("on the host {} {} is not the checkpoint that the other processes see there",
                                   host_name(), checkpoint->path()),
               .next_step = kHaveItThere};
}

Result<const RankSummary*> own_summary(const RankParts& parts, const Checkpoint& checkpoint) {
  if (const RankSummary* const own = checkpoint.manifest().find_rank(parts.rank)) return own;
  return Error{.code = Code::kIncompatible,
               .what = fmt::format("the checkpoint has nothing of rank {}", parts.rank),
               .next_step = "start the engine with as many ranks as the one that slept"};
}

Result<std::unique_ptr<DiskTier>> open_chunks(const RankParts& parts, const std::string& directory) {
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint, open_checkpoint(parts.file_system, directory, parts.key));
  TORPOR_ASSIGN_OR_RETURN(const RankSummary* const own, own_summary(parts, checkpoint));
  return checkpoint.open_rank(*own, nullptr, FileIo::kCached);
}

}  // namespace torpor
