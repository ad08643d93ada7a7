// SPDX-License-Identifier: Apache-2.0
// The word in the name of a namespace that changes when the tiers are to forget. What was stored under another one is
// found by nobody, after a restart neither. It lies beside the stores, as files `space-N` of which the last whole one
// counts; it is durable before anything is stored under it.
#pragma once

#include <string>

#include "base/file_system.h"
#include "base/status.h"

namespace torpor {

inline constexpr size_t kCacheEpochBytes = 32;  // of 0-9 and a-f

// Empty: nobody ever asked to forget. kCorruption, or what the system says: which word it was is not known.
Result<std::string> cache_epoch(FileSystem& files, const std::string& directory);

// For this process even where it cannot be kept; then those that follow may find what was stored before.
struct RenewedEpoch {
  std::string word;
  Status kept;
};
RenewedEpoch renew_cache_epoch(FileSystem& files, const std::string& directory);

// One that no process has had.
std::string random_cache_epoch();

}  // namespace torpor
