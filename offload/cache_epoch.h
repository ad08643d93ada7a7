// SPDX-License-Identifier: Apache-2.0
// The cache epoch: a word in the name of a namespace. A new word makes all stores forget: blocks stored under another
// word are never found, not even after a restart. The word lies beside the stores, in files `space-N`; the last file
// that is whole counts. It is durable before anything is stored under it.
//
// Threads: one caller at a time for a directory.
#pragma once

#include <string>

#include "base/file_system.h"
#include "base/status.h"

namespace torpor {

inline constexpr size_t kCacheEpochBytes = 32;  // characters 0-9 and a-f

// Return the word in `directory`; empty if it was never renewed. kCorruption, or the error of the file system, if the
// word cannot be read.
Result<std::string> cache_epoch(FileSystem& files, const std::string& directory);

// A new word. It applies to this process even if `kept` is an error. Then later processes find no blocks until it is
// renewed; or the older ones, if not even an empty file could be made, or its name is lost with the power.
struct RenewedEpoch {
  std::string word;
  Status kept;
};
// Make a new word and write it to `directory`.
RenewedEpoch renew_cache_epoch(FileSystem& files, const std::string& directory);

// Return a random word that no other process has.
std::string random_cache_epoch();

}  // namespace torpor
