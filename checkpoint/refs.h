// SPDX-License-Identifier: Apache-2.0
// RankRefs: one rank's share of a checkpoint: the files in which its memory lies, and which record lies where. Written,
// synced and read by that rank alone, as the file refs-rN (checkpoint/refs_codec.h); the manifest has its summary.
//
// A checkpoint is whole by itself: each file is in its own directory, the rank's own or a hard link to a file that an
// earlier checkpoint wrote, of which nothing else is needed.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/seal.h"
#include "offload/chunk.h"

namespace torpor {

// A file of records.
struct LinkedFile {
  std::string name;    // in the checkpoint's directory
  SealId id{};         // of the checkpoint that wrote it: whose seal its records have
  uint64_t bytes = 0;  // of the whole file
  friend bool operator==(const LinkedFile&, const LinkedFile&) = default;
};

struct RankRefs {
  int32_t rank = 0;
  std::vector<LinkedFile> files;    // the rank's own, then links; SavedChunk::file counts them
  std::vector<SavedChunk> records;  // in the order in which they were given
  friend bool operator==(const RankRefs&, const RankRefs&) = default;
};

struct RecordSums {
  uint64_t records = 0;
  uint64_t bytes = 0;         // in device memory
  uint64_t stored_bytes = 0;  // on disk
  uint64_t linked_bytes = 0;  // of stored_bytes, in links
  friend bool operator==(const RecordSums&, const RecordSums&) = default;
};

// What the manifest has of a rank: which refs are the right ones, and what need not be counted from them.
struct RankSummary {
  int32_t rank = 0;
  std::string refs;  // name of the file
  uint64_t refs_bytes = 0;
  ManifestMac refs_mac{};         // BLAKE2b-256 over it, keyed if the checkpoint is sealed
  std::vector<LinkedFile> files;  // those of the refs
  std::map<std::string, RecordSums> tags;
  uint64_t own_bytes() const { return files.empty() ? 0 : files[0].bytes; }
  friend bool operator==(const RankSummary&, const RankSummary&) = default;
};

// All but the refs file itself.
RankSummary summary_of(const RankRefs& refs);

}  // namespace torpor
