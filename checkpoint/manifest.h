// Manifest: the table of contents of a checkpoint, and the file MANIFEST that holds it. Bytes: checkpoint/FORMAT.md.
//
// The file describes itself: magic, format version, byte order, length, id, and a BLAKE2b-256 over header and body,
// keyed if the checkpoint is sealed. It is written last; a checkpoint without a whole manifest does not exist.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/digest.h"
#include "base/seal.h"
#include "base/status.h"
#include "base/value.h"
#include "offload/chunk.h"

namespace torpor {

inline constexpr uint32_t kFormatVersion = 2;
inline constexpr uint32_t kOldestFormatVersion = 1;  // that is still read
inline constexpr uint64_t kMaxManifestBytes = uint64_t{1} << 30;

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
  SealId id{};  // random; all zero in version 1
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

// `seal`: null, or of manifest.protection and manifest.id.
Bytes encode_manifest(const Manifest& manifest, const Seal* seal = nullptr);

// With a key, nothing but the header of fixed size is looked at before the whole is authenticated. `seal`, if not null,
// receives the seal of a sealed checkpoint. kCorruption: damaged. kIncompatible: another format version or byte order.
// kUnauthenticated: sealed and there is no key or another one, or a key is given and it is not sealed.
// Also checks that sections and chunks do not contradict each other (names unique, no chunk twice, sizes add up).
Result<Manifest> decode_manifest(std::span<const std::byte> file, const Key* key = nullptr,
                                 std::shared_ptr<const Seal>* seal = nullptr);

}  // namespace torpor
