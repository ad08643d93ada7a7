// Manifest: the table of contents of a checkpoint. checkpoint/manifest_codec.h turns it into the file MANIFEST and
// back.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/digest.h"
#include "base/seal.h"
#include "base/status.h"
#include "base/value.h"
#include "offload/chunk.h"

namespace torpor {

inline constexpr uint32_t kFormatVersion = 2;

// Names and values that must be equal for tokens to be equal.
using Fingerprint = std::map<std::string, std::string>;

// A chunk file: of this checkpoint, or of an earlier one of the same directory.
struct ChunkFile {
  uint64_t generation = 0;  // 0: of this checkpoint
  SealId id{};              // of the earlier checkpoint, so that another one of that number is not mistaken for it
  std::string name;
  uint64_t bytes = 0;
  friend bool operator==(const ChunkFile&, const ChunkFile&) = default;
};

// What one rank saved. Its own file comes first.
struct RankChunks {
  int32_t rank = 0;
  std::vector<ChunkFile> files;
  std::vector<SavedChunk> chunks;
  friend bool operator==(const RankChunks&, const RankChunks&) = default;
};

struct SectionInfo {
  std::string name;
  bool required = true;  // a reader that does not know it must refuse; otherwise it may carry it along
  uint64_t offset = 0;   // in STATE
  uint64_t stored_bytes = 0;
  uint64_t bytes = 0;
  Codec codec = Codec::kNone;
  Digest digest;   // of the stored bytes
  SealTag seal{};  // of them, if the checkpoint is sealed
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
  std::vector<SectionInfo> sections;
  std::vector<RankChunks> ranks;
  std::vector<uint64_t> needs() const;  // generations whose chunks it names, ascending
  uint64_t total_bytes() const;         // of this checkpoint's own files, MANIFEST left out
  friend bool operator==(const Manifest&, const Manifest&) = default;
};

}  // namespace torpor
