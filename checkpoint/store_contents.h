// SPDX-License-Identifier: Apache-2.0
// Operations on a whole directory of checkpoints: list all, and remove some. A caller that changes the directory must
// hold its lock.
#pragma once

#include <string>
#include <vector>

#include "base/file_system.h"
#include "checkpoint/retention.h"

namespace torpor {

// kAnySeal: also accept checkpoints that are not sealed with the current key. It suffices to keep or remove them, so
// checkpoints from before the key was set are removed like the others.
enum class Trust : uint8_t { kThisKey, kAnySeal };

Result<std::vector<CheckpointInfo>> infos_in(const Directory& store, const Key* key, Trust trust);  // oldest first
// Return whether an engine sleeps on this checkpoint (PendingCheckpoint::hold_asleep()).
bool is_slept_on(const Directory& store, uint64_t generation);
Status check_not_slept_on(const Directory& store, uint64_t generation);  // else kUnavailable
// Remove a checkpoint. It is renamed first, durably, so that a half-removed checkpoint never counts as one.
// kUnavailable: an engine sleeps on it.
Status remove_generation(Directory& store, uint64_t generation);
Result<std::string> hide_generation(Directory& store, uint64_t generation);  // only renames; returns the new name
// Return the names that a killed writer left (is_leftover()).
Result<std::vector<std::string>> leftovers_in(const Directory& store);
Status remove_leftovers(Directory& store);
// Remove the checkpoints that the retention no longer keeps and no engine sleeps on; return their names. `dry_run`:
// only return the names. `owner`: only of this owner; none: of every owner. Checkpoints that cannot be read are logged,
// each once per process.
Result<std::vector<std::string>> retire(Directory& store, const Key* key, const Retention& retention,
                                        double now_unix_seconds, bool dry_run, const std::optional<Digest>& owner);

}  // namespace torpor
