// SPDX-License-Identifier: Apache-2.0
// What one rank reads of a committed checkpoint. Owner: none, these are functions. Threads: any.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "checkpoint/checkpoint.h"
#include "engine/rank_parts.h"
#include "offload/disk_tier.h"

namespace torpor {

// Open the checkpoint that the controller, or the first rank, has opened at this path. kNotFound: this host has no
// checkpoint there. kIncompatible: it has another one. The error names the host.
Result<Checkpoint> open_same(const RankParts& parts, const std::string& path, uint64_t generation, const SealId& id);
// Return what the checkpoint has of this rank. kIncompatible: it has nothing of it.
Result<const RankSummary*> own_summary(const RankParts& parts, const Checkpoint& checkpoint);
// Open this rank's chunks in the checkpoint at `directory`.
Result<std::unique_ptr<DiskTier>> open_chunks(const RankParts& parts, const std::string& directory);

}  // namespace torpor
