// Manifest: the table of contents of a checkpoint, and the file MANIFEST that holds it.
//
// The file describes itself: magic, format version, byte order, length, and a digest over the body. It is written last;
// a checkpoint without a whole manifest does not exist.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/digest.h"
#include "base/status.h"
#include "base/value.h"
#include "offload/chunk.h"

namespace torpor {

inline constexpr uint32_t kFormatVersion = 1;

// What one rank saved: its chunk file (a name inside the checkpoint's directory) and the chunks in it.
struct RankChunks {
  int32_t rank = 0;
  std::string file;
  uint64_t file_bytes = 0;
  std::vector<SavedChunk> chunks;
  friend bool operator==(const RankChunks&, const RankChunks&) = default;
};

struct SectionInfo {
  std::string name;
  uint64_t offset = 0;  // in STATE
  uint64_t stored_bytes = 0;
  uint64_t bytes = 0;
  Codec codec = Codec::kNone;
  Digest digest;  // of the stored bytes
  friend bool operator==(const SectionInfo&, const SectionInfo&) = default;
};

struct Manifest {
  uint32_t format_version = kFormatVersion;
  uint64_t generation = 0;
  double created_unix_seconds = 0;
  std::string creator;  // "torpor 0.1.0"
  std::vector<SectionInfo> sections;
  std::vector<RankChunks> ranks;
  uint64_t total_bytes() const;  // of all files, MANIFEST left out
  friend bool operator==(const Manifest&, const Manifest&) = default;
};

Bytes encode_manifest(const Manifest& manifest);
// kCorruption when the bytes are damaged, kIncompatible for another format version or byte order. Also checks that
// sections and chunks do not contradict each other (names unique, no chunk twice, sizes add up).
Result<Manifest> decode_manifest(std::span<const std::byte> file);

}  // namespace torpor
