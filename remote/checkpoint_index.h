// SPDX-License-Identifier: Apache-2.0
// CheckpointIndex: the index of a pushed checkpoint: its files and their parts. remote/FORMAT.md has the keys and the
// JSON. Values.
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

inline constexpr uint64_t kPartBytes = 16 << 20;       // of every part of a file but its last
inline constexpr uint64_t kMostIndexBytes = 64 << 20;  // enough for more than 10 TB of checkpoint

struct IndexedFile {
  std::string name;  // in the checkpoint's directory
  uint64_t bytes = 0;
  std::vector<std::string> parts;  // BLAKE2b-256 of each, in hexadecimal digits
  friend bool operator==(const IndexedFile&, const IndexedFile&) = default;
};

struct CheckpointIndex {
  std::string id;  // the checkpoint's, in hexadecimal digits
  uint64_t generation = 0;
  double created_unix_seconds = 0;
  std::string creator;
  // True: the checkpoint has metadata of a user. No value: the index is of an earlier version. It is not sealed, and
  // only saves a request.
  std::optional<bool> has_metadata;
  std::vector<IndexedFile> files;  // MANIFEST first
  uint64_t bytes() const;
  friend bool operator==(const CheckpointIndex&, const CheckpointIndex&) = default;
};

// Return "20261123T071500Z-<id>". Names sort by age.
std::string index_name(const CheckpointIndex& index);
std::string index_key(std::string_view name);  // "checkpoints/<name>"
std::string part_key(std::string_view hash);   // "parts/ab/abcd…"
// Return whether index_name() or part_key() can be this. A store may have other objects, of others, beside them.
bool is_index_name(std::string_view name);
bool is_part_key(std::string_view key);
std::string part_hash(std::span<const std::byte> part);

std::string encode_index(const CheckpointIndex& index);
// Decode and check an index. kCorruption: it is not an index, or its names, sizes and hashes cannot be a checkpoint's.
// kIncompatible: it has another format.
Result<CheckpointIndex> decode_index(std::string_view text);

}  // namespace torpor::remote
