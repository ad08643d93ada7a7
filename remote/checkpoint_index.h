// SPDX-License-Identifier: Apache-2.0
// The index of a checkpoint that was pushed: which parts make up its files. remote/FORMAT.md has the keys and the JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/seal.h"
#include "base/status.h"
#include "checkpoint/manifest.h"

namespace torpor::remote {

inline constexpr uint64_t kPartBytes = 16 << 20;       // of a file's part but its last
inline constexpr uint64_t kMostIndexBytes = 64 << 20;  // over 10 TB of checkpoint

struct IndexedFile {
  std::string name;  // in the checkpoint's directory
  uint64_t bytes = 0;
  std::vector<std::string> parts;  // BLAKE2b-256 of each, in hexadecimal digits
  friend bool operator==(const IndexedFile&, const IndexedFile&) = default;
};

struct CheckpointIndex {
  std::string id;  // of the checkpoint, in hexadecimal digits
  uint64_t generation = 0;
  double created_unix_seconds = 0;
  std::string creator;
  // Whether it has metadata of a user's; no value in indexes of earlier versions. Not sealed, so it only spares a look.
  std::optional<bool> has_metadata;
  std::vector<IndexedFile> files;  // MANIFEST first
  uint64_t bytes() const;
  friend bool operator==(const CheckpointIndex&, const CheckpointIndex&) = default;
};

// "20261123T071500Z-<id>": sorted by name they are sorted by age.
std::string index_name(const CheckpointIndex& index);
std::string index_key(std::string_view name);  // "checkpoints/<name>"
std::string part_key(std::string_view hash);   // "parts/ab/abcd…"
std::string part_hash(std::span<const std::byte> part);

std::string encode_index(const CheckpointIndex& index);
// kCorruption: not an index, or one whose names, sizes and hashes cannot be those of a checkpoint. kIncompatible: of
// another format.
Result<CheckpointIndex> decode_index(std::string_view text);

}  // namespace torpor::remote
