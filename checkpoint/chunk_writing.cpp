#include "checkpoint/chunk_writing.h"

#include <algorithm>

#include <fmt/format.h>

namespace torpor {
namespace {

const RankChunks* known_of(const ChunkWriting& writing, int32_t rank) {
  const auto found = std::find_if(writing.known.begin(), writing.known.end(),
                                  [rank](const RankChunks& chunks) { return chunks.rank == rank; });
  return found == writing.known.end() ? nullptr : &*found;
}

}  // namespace

std::string chunk_file_name(int32_t rank) { return fmt::format("chunks-r{}", rank); }

std::vector<RankChunks> known_chunks(const Manifest& base) {
  std::vector<RankChunks> known = base.ranks;
  for (RankChunks& rank : known) {
    rank.files[0].generation = base.generation;
    rank.files[0].id = base.id;
    for (SavedChunk& chunk : rank.chunks) ++chunk.file;
  }
  return known;
}

Result<ChunkFileOptions> chunk_file_options(const ChunkWriting& writing, int32_t rank, const Key* key) {
  ChunkFileOptions options{.rank = rank, .compression = writing.compression};
  if (writing.protection != Protection::kNone) {
    if (key == nullptr)
      return Error{.code = Code::kInvalidArgument,
                   .what = fmt::format("rank {} has no key to seal its chunks with", rank),
                   .next_step = "set key_file for all processes of the engine"};
    options.seal = std::make_shared<Seal>(*key, writing.id, writing.protection);
  }
  if (const RankChunks* known = known_of(writing, rank)) options.known = known->chunks;
  return options;
}

RankChunks finished_rank(const ChunkWriting& writing, int32_t rank, uint64_t own_bytes,
                         std::vector<SavedChunk> chunks) {
  RankChunks finished{
      .rank = rank, .files = {{.name = chunk_file_name(rank), .bytes = own_bytes}}, .chunks = std::move(chunks)};
  const RankChunks* const known = known_of(writing, rank);
  std::vector<uint32_t> place(known == nullptr ? 1 : known->files.size() + 1, 0);
  for (SavedChunk& chunk : finished.chunks) {
    if (chunk.file == 0) continue;
    uint32_t& now = place[chunk.file];
    if (now == 0) {
      now = static_cast<uint32_t>(finished.files.size());
      finished.files.push_back(known->files[chunk.file - 1]);
    }
    chunk.file = now;
  }
  return finished;
}

}  // namespace torpor
