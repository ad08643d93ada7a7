// SPDX-License-Identifier: Apache-2.0
// What is done to a directory of checkpoints as a whole: looking at all of them, and taking them away. Whoever changes
// it holds its lock.
#pragma once

#include <string>
#include <vector>

#include "base/file_system.h"
#include "checkpoint/retention.h"

namespace torpor {

// What is only kept or removed need not be sealed with today's key: those from before it was set go their way too.
enum class Trust : uint8_t { kThisKey, kAnySeal };

Result<std::vector<CheckpointInfo>> infos_in(const Directory& store, const Key* key, Trust trust);  // oldest first
// Away from its name first, durably, so that a half-removed checkpoint is never seen as one.
Status remove_generation(Directory& store, uint64_t generation);
Result<std::string> hide_generation(Directory& store, uint64_t generation);  // only that; what its leftovers are called
// What a killed writer left.
Result<std::vector<std::string>> leftovers_in(const Directory& store);
Status remove_leftovers(Directory& store);
// Removes what may go; its names. `dry_run`: only says so. `owner`: of these alone; none: of each owner. Each one that
// cannot be read is named in the log, once in a process.
Result<std::vector<std::string>> retire(Directory& store, const Key* key, const Retention& retention,
                                        double now_unix_seconds, bool dry_run, const std::optional<Digest>& owner);

}  // namespace torpor
