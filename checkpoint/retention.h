// SPDX-License-Identifier: Apache-2.0
// Which checkpoints of a directory may go: the decision alone, over what list() knows.
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

// Which committed checkpoints may go. Each owner's (Manifest::owner) are counted by themselves: never the newest goes,
// nor the last one that was woken from, nor, until the newest was woken from, the one before it. A checkpoint that
// cannot be read is not counted and never goes.
struct Retention {
  int keep = 2;                             // the newest ones
  std::optional<double> max_age_seconds;    // older ones go
  std::optional<uint64_t> max_total_bytes;  // the oldest go until the rest fits; a file with several links counts once
};

struct CheckpointInfo {  // a line of `torpor ls`
  std::string name;      // "g-000001"
  std::string path;
  bool readable = false;  // the manifest is whole
  Error problem;          // meaningful unless readable
  bool woken = false;     // it was woken from
  // Meaningful if readable; without sections.
  Manifest manifest;
  uint64_t bytes = 0;   // of the files that it wrote itself
  Metadata metadata{};  // what a user attached; only list() looks
};

// Bytes on disk of several checkpoints together, where a file to which several have links counts once.
class DiskUsage {
 public:
  // The sum with one more; `own_bytes`: its total_bytes().
  uint64_t with(const Manifest& manifest, uint64_t own_bytes) const;
  void add(const Manifest& manifest, uint64_t own_bytes);
  uint64_t bytes() const { return bytes_; }

 private:
  std::set<std::pair<int32_t, SealId>> counted_;  // a file is known by its rank and by the checkpoint that wrote it
  uint64_t bytes_ = 0;
};

// Returns the generations that may go, oldest first. `checkpoints`: oldest first. `owner`: only checkpoints of this one
// may go; none: of each.
std::vector<uint64_t> retired(const std::vector<CheckpointInfo>& checkpoints, const Retention& retention,
                              double now_unix_seconds, const std::optional<Digest>& owner = std::nullopt);

}  // namespace torpor
