// ChunkWriting: how the ranks of one checkpoint write their chunk files: with which seal and compression, and which
// chunks of an earlier checkpoint need not be written again. A value, so that it can go to other processes; the key
// cannot.
#pragma once

#include <memory>
#include <vector>

#include "checkpoint/manifest.h"
#include "offload/disk_tier.h"

namespace torpor {

struct ChunkWriting {
  SealId id{};
  Protection protection = Protection::kNone;
  CompressionOptions compression{.codec = Codec::kNone};
  std::vector<RankChunks> known;  // of each rank: files of earlier checkpoints, and their chunks
};

std::string chunk_file_name(int32_t rank);  // "chunks-r0"

// The chunks of `base` as a later checkpoint of the same directory may name them: each file with its generation and id,
// SavedChunk::file counting from 1, as the later one's own file is 0.
std::vector<RankChunks> known_chunks(const Manifest& base);

// kInvalidArgument: `writing` is sealed and there is no key.
Result<ChunkFileOptions> chunk_file_options(const ChunkWriting& writing, int32_t rank, const Key* key);

// What a rank saved, for the manifest: its own file, and of the known files those that its chunks name.
RankChunks finished_rank(const ChunkWriting& writing, int32_t rank, uint64_t own_bytes, std::vector<SavedChunk> chunks);

}  // namespace torpor
