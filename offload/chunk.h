// SPDX-License-Identifier: Apache-2.0
// Chunk: the unit in which bytes are saved, proven and restored: a piece of a region, or one KV block over all layers.
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

// Where a chunk's bytes lie in device memory, in order.
struct ChunkPlan {
  ChunkKey key;
  std::vector<DevicePiece> pieces;
  uint64_t bytes() const;
};
uint64_t bytes_of(std::span<const ChunkPlan> plans);
// Return the end of a job that begins at `first`: it has at most `most` bytes, each chunk in whole pages, or one chunk.
// The staging memory of its batches is never more than that.
size_t end_of_job(std::span<const ChunkPlan> plans, size_t first, uint64_t most);

// A chunk that was saved: what it is, what its bytes hash to, where it lies in its store.
struct SavedChunk {
  ChunkKey key;
  uint64_t bytes = 0;  // in device memory
  Digest digest;       // of these bytes
  Codec codec = Codec::kNone;
  uint64_t offset = 0;        // in its store: in its file; in a HostTier, its number there; in a SlotStore, its slot
  uint64_t stored_bytes = 0;  // in its store
  uint32_t file = 0;          // which of a rank's files it lies in; 0: the rank's own
  SealTag seal{};             // of the stored bytes, if the checkpoint is sealed
  friend bool operator==(const SavedChunk&, const SavedChunk&) = default;
};

}  // namespace torpor
