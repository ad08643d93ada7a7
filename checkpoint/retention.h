// Which checkpoints of a directory may go: the decision alone, over what list() knows.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "checkpoint/manifest.h"

namespace torpor {

// Which committed checkpoints may go. Never the newest, nor the last one that was woken from, nor, until the newest was
// woken from, the one before it; one whose chunks a kept one names stays with it; and all stay while one cannot be
// read.
struct Retention {
  int keep = 2;                             // the newest ones
  std::optional<double> max_age_seconds;    // older ones go
  std::optional<uint64_t> max_total_bytes;  // the oldest go until the rest fits
};

struct CheckpointInfo {  // a line of `torpor ls`
  std::string name;      // "g-000001"
  std::string path;
  bool readable = false;  // the manifest is whole
  Error problem;          // meaningful unless readable
  bool woken = false;     // it was woken from
  // Meaningful if readable; without sections and chunks.
  Manifest manifest;
  uint64_t bytes = 0;  // of its files
  size_t ranks = 0;
  std::vector<uint64_t> needs;  // generations whose chunks it names
};

// Generations that may go, oldest first. `checkpoints`: oldest first.
std::vector<uint64_t> retired(const std::vector<CheckpointInfo>& checkpoints, const Retention& retention,
                              double now_unix_seconds);

}  // namespace torpor
