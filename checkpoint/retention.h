// SPDX-License-Identifier: Apache-2.0
// Decides which checkpoints of a directory may be removed, from the result of list().
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "checkpoint/manifest.h"
#include "checkpoint/metadata.h"

namespace torpor {

// The limits. The checkpoints of each owner (Manifest::owner) are counted separately. Three are never removed: the
// newest; the last one that was woken from; and, until the newest was woken from, the one before the newest. A
// checkpoint that cannot be read is neither counted nor removed.
struct Retention {
  int keep = 2;                           // number of newest ones to keep
  std::optional<double> max_age_seconds;  // remove older ones
  // Remove the oldest until the rest fits; a file with several links counts once.
  std::optional<uint64_t> max_total_bytes;
};

struct CheckpointInfo {     // a line of `torpor ls`
  std::string name;         // "g-000001"
  uint64_t generation = 0;  // of its name; that of the manifest is the original's, if this is a copy
  std::string path;
  bool readable = false;  // the manifest is intact
  Error problem;          // set unless readable
  bool woken = false;     // an engine has woken from it
  // Set if readable; without sections.
  Manifest manifest;
  uint64_t bytes = 0;   // size of the files that it wrote itself
  Metadata metadata{};  // attached by a user; only list() reads it
};

// Bytes on disk of several checkpoints together. A file with several links counts once.
class DiskUsage {
 public:
  // Return the sum including one more checkpoint; `own_bytes`: its total_bytes().
  uint64_t with(const Manifest& manifest, uint64_t own_bytes) const;
  void add(const Manifest& manifest, uint64_t own_bytes);
  uint64_t bytes() const { return bytes_; }

 private:
  std::set<std::pair<int32_t, SealId>> counted_;  // rank and writing checkpoint identify a file
  uint64_t bytes_ = 0;
};

// Return the generations that may be removed, oldest first. `checkpoints`: oldest first. `owner`: only checkpoints of
// this owner may be removed; none: of every owner.
std::vector<uint64_t> retired(const std::vector<CheckpointInfo>& checkpoints, const Retention& retention,
                              double now_unix_seconds, const std::optional<Digest>& owner = std::nullopt);

}  // namespace torpor
