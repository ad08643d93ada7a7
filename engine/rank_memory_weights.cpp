// SPDX-License-Identifier: Apache-2.0
// Digests of a rank's content. The digest of named weights is over the named bytes, wherever they lie in their regions.

#include <algorithm>

#include <fmt/core.h>

#include "base/units.h"
#include "engine/combined_digest.h"
#include "engine/rank_memory.h"
#include "engine/tags.h"

namespace torpor {

Status RankMemory::name_weights(std::string label, std::vector<DevicePiece> pieces) {
  TORPOR_RETURN_IF_ERROR(same_process());
  const MutexLock lock(mutex_);
  const std::vector<RegionInfo> regions = allocator_->regions_of(kWeightsTag);
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
  named_weights_ = NamedWeights{.label = std::move(label), .pieces = std::move(pieces)};
  return ok();
}

Result<std::string> RankMemory::weights_digest() {
  const MutexLock lock(mutex_);
  orders::DigestTags order{.tags = {kWeightsTag}, .named = named_weights_.has_value()};
  TORPOR_ASSIGN_OR_RETURN(const orders::DigestTags::Reply reply, carry_out(order));
  const auto found = reply.digests.find(kWeightsTag);
  return found == reply.digests.end() ? std::string() : found->second;
}

Result<orders::DigestTags::Reply> RankMemory::digest_named(bool as_proven) {
  orders::DigestTags::Reply reply;
  if (!named_weights_) return reply;
  NamedWeights& named = *named_weights_;
  orders::Describe::Reply described;
  images_->describe(described);
  const uint64_t writes = described.writes[kWeightsTag];
  if (!as_proven || named.digest.empty() || named.writes != writes) {
    const std::map<std::string, RegionState> states = allocator_->states();
    const auto state = states.find(kWeightsTag);
    if (state == states.end() || (state->second != RegionState::kAttached && state->second != RegionState::kSaving)) {
      return Error{.code = Code::kFailedPrecondition,
                   .what = "the weights are not on the device",
                   .next_step = "wake them first"};
    }
    constexpr uint64_t kChunk = 4 * kMiB;
    std::vector<ChunkPlan> plans;
    uint64_t room = 0;  // in the last one
    for (const DevicePiece& piece : named.pieces) {
      for (uint64_t offset = 0; offset < piece.bytes;) {
        if (room == 0) {
          plans.push_back(
              {.key = {.kind = ChunkKind::kRegion, .tag = kWeightsTag, .region = named.label, .index = plans.size()},
               .pieces = {}});
          room = kChunk;
        }
        const uint64_t bytes = std::min(room, piece.bytes - offset);
        plans.back().pieces.push_back({piece.address + offset, bytes});
        offset += bytes;
        room -= bytes;
      }
    }
    TORPOR_ASSIGN_OR_RETURN(const std::vector<Digest> digests, transfers_->digests(plans));
    CombinedDigest all;
    for (size_t i = 0; i < plans.size(); ++i) all.add(plans[i].key, digests[i]);
    reply.bytes = bytes_of(plans);
    named.digest = all.finish();
    named.writes = writes;
  }
  reply.digests[kWeightsTag] = named.digest;
  return reply;
}

std::optional<std::string> RankMemory::proven_digest(const std::string& tag) {
  const MutexLock lock(mutex_);
  return images_->proven(tag);
}

}  // namespace torpor
