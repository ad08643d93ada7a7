// SPDX-License-Identifier: Apache-2.0
// RankRefs: one rank's part of a checkpoint: the files that hold its memory, and the location of each record. Only that
// rank writes and syncs it, as the file refs-rN (checkpoint/refs_codec.h); the manifest has its summary.
//
// A checkpoint is whole by itself: each file is in its own directory, either the rank's own file or a hard link to a
// file that an earlier checkpoint wrote. It needs nothing else of the earlier checkpoint.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/seal.h"
#include "offload/chunk.h"

namespace torpor {

// A file with records.
struct LinkedFile {
  std::string name;    // in the checkpoint's directory
  SealId id{};         // checkpoint that wrote the file and sealed its records
  uint64_t bytes = 0;  // of the whole file
  friend bool operator==(const LinkedFile&, const LinkedFile&) = default;
};

struct RankRefs {
  int32_t rank = 0;
  std::vector<LinkedFile> files;    // the rank's own, then links; SavedChunk::file is the index in this list
  std::vector<SavedChunk> records;  // in the order in which they were given
  friend bool operator==(const RankRefs&, const RankRefs&) = default;
};

struct RecordSums {
  uint64_t records = 0;
  uint64_t bytes = 0;         // in device memory
  uint64_t stored_bytes = 0;  // on disk
  uint64_t linked_bytes = 0;  // part of stored_bytes that lies in links
  friend bool operator==(const RecordSums&, const RecordSums&) = default;
};

// A rank's entry in the manifest. It identifies the right refs, and has sums, for which readers need not read the refs.
struct RankSummary {
  int32_t rank = 0;
  std::string refs;  // name of the file
  uint64_t refs_bytes = 0;
  ManifestMac refs_mac{};         // BLAKE2b-256 over the file, keyed if the checkpoint is sealed
  std::vector<LinkedFile> files;  // as in the refs
  std::map<std::string, RecordSums> tags;
  uint64_t own_bytes() const { return files.empty() ? 0 : files[0].bytes; }
  friend bool operator==(const RankSummary&, const RankSummary&) = default;
};

// Return the summary without the fields of the refs file itself.
RankSummary summary_of(const RankRefs& refs);

}  // namespace torpor
