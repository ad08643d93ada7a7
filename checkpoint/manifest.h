// SPDX-License-Identifier: Apache-2.0
// Manifest: the table of contents of a checkpoint. checkpoint/manifest_codec.h reads and writes it as the file
// MANIFEST.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/digest.h"
#include "base/seal.h"
#include "base/status.h"
#include "base/value.h"
#include "checkpoint/refs.h"
#include "offload/chunk.h"

namespace torpor {

inline constexpr uint32_t kFormatVersion = 4;
inline constexpr uint32_t kOldestFormatVersion = 3;  // the oldest that can be read

// Names and values that must be equal for tokens to be equal.
using Fingerprint = std::map<std::string, std::string>;

// Return the owner for the checkpoints of an engine that started without a checkpoint. An engine that woke from a
// checkpoint keeps the owner of that checkpoint, even if its weights change.
Digest owner_of(const Fingerprint& fingerprint);

struct SectionInfo {
  std::string name;
  bool required = true;  // a reader that does not know it must refuse the checkpoint; if false, it may carry it along
  uint64_t offset = 0;   // in STATE
  uint64_t stored_bytes = 0;
  uint64_t bytes = 0;
  Codec codec = Codec::kNone;
  Digest digest;   // of the stored bytes
  SealTag seal{};  // of the stored bytes, if the checkpoint is sealed
  friend bool operator==(const SectionInfo&, const SectionInfo&) = default;
};

struct Manifest {
  uint32_t format_version = kFormatVersion;
  Protection protection = Protection::kNone;
  SealId id{};  // random
  uint64_t generation = 0;
  double created_unix_seconds = 0;
  std::string creator;  // "torpor 0.1.0"
  Fingerprint fingerprint;
  Digest owner;  // engine that wrote it: retention counts the checkpoints of each owner
  std::vector<SectionInfo> sections;
  std::vector<RankSummary> ranks;
  const RankSummary* find_rank(int32_t rank) const;            // null: it has nothing of that rank
  uint64_t total_bytes() const;                                // of the files that it wrote itself, without MANIFEST
  uint64_t stored_bytes_but_of(const std::string& tag) const;  // of all records of other tags
  uint64_t linked_bytes() const;                               // of the linked files of earlier checkpoints
  friend bool operator==(const Manifest&, const Manifest&) = default;
};

// A manifest as it was read.
struct OpenedManifest {
  Manifest manifest;
  std::shared_ptr<const Seal> seal;  // null: the checkpoint is not sealed
};

Error damaged_manifest(std::string what);
Status check_sections(const Manifest& manifest);  // they lie one after the other and have different names

}  // namespace torpor
