// SPDX-License-Identifier: Apache-2.0
#include "engine/named_weights.h"

#include <algorithm>

#include <fmt/core.h>

#include "base/units.h"
#include "engine/combined_digest.h"
#include "engine/tags.h"

namespace torpor {

Status NamedWeights::set(std::string label, std::vector<DevicePiece> pieces) {
  const std::vector<RegionInfo> regions = parts_.allocator.regions_of(kWeightsTag);
  for (const DevicePiece& piece : pieces) {
    const bool inside = std::any_of(regions.begin(), regions.end(), [&](const RegionInfo& region) {
      return piece.address >= region.address && piece.bytes <= region.size_bytes &&
             piece.address - region.address <= region.size_bytes - piece.bytes;
    });
    if (inside) continue;
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("{} bytes at {:#x} are in no region of the weights", piece.bytes, piece.address),
                 .next_step = "name what was allocated with their tag"};
  }
  label_ = std::move(label);
  pieces_ = std::move(pieces);
  invalidate();
  any_ = true;
  return ok();
}

bool NamedWeights::attached() const {
  const std::map<std::string, RegionState> states = parts_.allocator.states();
  const auto state = states.find(kWeightsTag);
  return state != states.end() && (state->second == RegionState::kAttached || state->second == RegionState::kSaving);
}

std::vector<ChunkPlan> NamedWeights::plans() const {
  constexpr uint64_t kChunk = 4 * kMiB;
  std::vector<ChunkPlan> plans;
  uint64_t room = 0;  // in the last one
  for (const DevicePiece& piece : pieces_) {
    for (uint64_t offset = 0; offset < piece.bytes;) {
      if (room == 0) {
        plans.push_back(
            {.key = {.kind = ChunkKind::kRegion, .tag = kWeightsTag, .region = label_, .index = plans.size()},
             .pieces = {}});
        room = kChunk;
      }
      const uint64_t bytes = std::min(room, piece.bytes - offset);
      plans.back().pieces.push_back({piece.address + offset, bytes});
      offset += bytes;
      room -= bytes;
    }
  }
  return plans;
}

Result<orders::DigestTags::Reply> NamedWeights::digest(bool as_proven, uint64_t writes) {
  orders::DigestTags::Reply reply;
  if (!as_proven || digest_.empty() || writes_ != writes) {
    if (!attached()) {
      return Error{.code = Code::kFailedPrecondition,
                   .what = "the weights are not on the device",
                   .next_step = "wake them first"};
    }
    const std::vector<ChunkPlan> read = plans();
    TORPOR_ASSIGN_OR_RETURN(const std::vector<Digest> digests, parts_.blocking_transfers.digests(read));
    CombinedDigest all;
    for (size_t i = 0; i < read.size(); ++i) all.add(read[i].key, digests[i]);
    reply.bytes = bytes_of(read);
    digest_ = all.finish();
    writes_ = writes;
  }
  reply.digests[kWeightsTag] = digest_;
  return reply;
}

std::vector<ChunkPlan> NamedWeights::watch(uint64_t writes) {
  watched_.reset();
  if (!any_ || !attached() || (!digest_.empty() && writes_ == writes)) return {};
  watched_ = writes;
  return plans();
}

void NamedWeights::note_watched(std::string digest) {
  if (!watched_) return;
  digest_ = std::move(digest);
  writes_ = *watched_;  // digest() reads them again if they were written since
  watched_.reset();
}

void NamedWeights::on_freed(const RegionInfo& region) {
  if (!any_ || region.tag != kWeightsTag) return;
  // The named pieces are not the engine's weights any more.
  any_ = std::none_of(pieces_.begin(), pieces_.end(), [&](const DevicePiece& piece) {
    return piece.address >= region.address && piece.address - region.address < region.size_bytes;
  });
}

}  // namespace torpor
