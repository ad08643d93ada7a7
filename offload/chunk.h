// SPDX-License-Identifier: Apache-2.0
// Chunk: the unit that is saved, verified and restored: a piece of a region, or one KV block over all layers. Values.
#pragma once

#include <compare>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/digest.h"
#include "base/seal.h"

namespace torpor {

enum class ChunkKind : uint8_t { kRegion, kKvBlock };
enum class Codec : uint8_t { kNone, kZstd, kBf16 };

struct ChunkKey {
  ChunkKind kind = ChunkKind::kRegion;
  std::string tag;     // "weights", "kv_cache", …
  std::string region;  // the region's name; empty for KV blocks
  uint64_t index = 0;  // kRegion: number of the piece within the region; kKvBlock: number of the block
  friend auto operator<=>(const ChunkKey&, const ChunkKey&) = default;
  std::string to_string() const;  // "weights/params[3]", "kv_cache block 17"
};

struct DevicePiece {
  uint64_t address = 0;
  uint64_t bytes = 0;
};

// The pieces of device memory that hold a chunk, in order.
struct ChunkPlan {
  ChunkKey key;
  std::vector<DevicePiece> pieces;
  uint64_t bytes() const;
};
uint64_t bytes_of(std::span<const ChunkPlan> plans);
// Return the end of a job that begins at chunk `first`. The job has at most `most` bytes, with each chunk rounded up to
// whole pages, or it is one larger chunk. Its batches need no more staging memory than that.
size_t end_of_job(std::span<const ChunkPlan> plans, size_t first, uint64_t most);

// A chunk that was saved: its key, its digest, and where its store has it.
struct SavedChunk {
  ChunkKey key;
  uint64_t bytes = 0;  // in device memory
  Digest digest;       // of these bytes
  Codec codec = Codec::kNone;
  uint64_t offset = 0;        // DiskTier: offset in the file; HostTier: position in its list; SlotStore: slot
  uint64_t stored_bytes = 0;  // size in the store
  uint32_t file = 0;          // index into the rank's files; 0: the rank's own
  SealTag seal{};             // over the stored bytes, if the checkpoint is sealed
  friend bool operator==(const SavedChunk&, const SavedChunk&) = default;
};

}  // namespace torpor
