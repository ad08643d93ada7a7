#include "checkpoint/format_v1.h"

#include "checkpoint/archived_values.h"
#include "checkpoint/section_reader.h"

namespace torpor {

struct SavedChunkV1 {
  ChunkKey key;
  uint64_t bytes = 0;
  Digest digest;
  Codec codec = Codec::kNone;
  uint64_t offset = 0;
  uint64_t stored_bytes = 0;
};
struct RankChunksV1 {
  int32_t rank = 0;
  std::string file;
  uint64_t file_bytes = 0;
  std::vector<SavedChunkV1> chunks;
};
struct SectionInfoV1 {
  std::string name;
  uint64_t offset = 0;
  uint64_t stored_bytes = 0;
  uint64_t bytes = 0;
  Codec codec = Codec::kNone;
  Digest digest;
};
struct ManifestV1 {
  uint64_t generation = 0;
  double created_unix_seconds = 0;
  std::string creator;
  std::vector<SectionInfoV1> sections;
  std::vector<RankChunksV1> ranks;
};

template <class Archive>
void serialize(Archive& archive, SavedChunkV1& v) {
  archive(v.key, v.bytes, v.digest, checked(v.codec, Codec::kZstd), v.offset, v.stored_bytes);
}
template <class Archive>
void serialize(Archive& archive, RankChunksV1& v) {
  archive(v.rank, v.file, v.file_bytes, v.chunks);
}
template <class Archive>
void serialize(Archive& archive, SectionInfoV1& v) {
  archive(v.name, v.offset, v.stored_bytes, v.bytes, checked(v.codec, Codec::kZstd), v.digest);
}
template <class Archive>
void serialize(Archive& archive, ManifestV1& v) {
  archive(v.generation, v.created_unix_seconds, v.creator, v.sections, v.ranks);
}

namespace {

struct HeaderV1 {
  std::array<char, 8> magic{};
  uint32_t format_version = 0;
  uint32_t endianness = 0;
  uint64_t body_bytes = 0;
  Digest body_digest;
  std::array<uint8_t, 24> reserved{};
};
static_assert(sizeof(HeaderV1) == 64);

constexpr uint32_t kSectionVersionV1 = 1;

Error damaged_v1(std::string what) {
  return Error{
      .code = Code::kCorruption, .what = fmt::format("MANIFEST: {}", what), .next_step = "use another checkpoint"};
}

}  // namespace

Result<Manifest> decode_manifest_v1(std::span<const std::byte> file) {
  HeaderV1 header;
  if (file.size() < sizeof header)
    return damaged_v1(fmt::format("it has {} bytes, fewer than its header", file.size()));
  std::memcpy(&header, file.data(), sizeof header);
  const std::span<const std::byte> body = file.subspan(sizeof header);
  if (header.reserved != decltype(header.reserved){}) return damaged_v1("its header is not whole");
  if (body.size() != header.body_bytes)
    return damaged_v1(fmt::format("it has {} bytes after the header, {} were written", body.size(), header.body_bytes));
  if (digest_of(body) != header.body_digest) return damaged_v1("its digest does not match");
  TORPOR_ASSIGN(ManifestV1 old, from_bytes<ManifestV1>(body, "MANIFEST"));
  Manifest manifest{.format_version = 1,
                    .generation = old.generation,
                    .created_unix_seconds = old.created_unix_seconds,
                    .creator = std::move(old.creator)};
  for (SectionInfoV1& section : old.sections) {
    manifest.sections.push_back({.name = std::move(section.name),
                                 .offset = section.offset,
                                 .stored_bytes = section.stored_bytes,
                                 .bytes = section.bytes,
                                 .codec = section.codec,
                                 .digest = section.digest});
  }
  for (RankChunksV1& rank : old.ranks) {
    RankChunks& chunks = manifest.ranks.emplace_back(
        RankChunks{.rank = rank.rank, .files = {{.name = std::move(rank.file), .bytes = rank.file_bytes}}});
    for (SavedChunkV1& chunk : rank.chunks) {
      chunks.chunks.push_back({.key = std::move(chunk.key),
                               .bytes = chunk.bytes,
                               .digest = chunk.digest,
                               .codec = chunk.codec,
                               .offset = chunk.offset,
                               .stored_bytes = chunk.stored_bytes});
    }
  }
  return manifest;
}

Result<EngineCheckpoint> decode_v1(std::span<const Section> sections) {
  EngineCheckpoint checkpoint;
  SchedulerSnapshot& scheduler = checkpoint.state.scheduler;
  KvSnapshot& kv = checkpoint.state.kv;
  SectionReader reader(sections, kSectionVersionV1);
  TORPOR_TRY(reader.take("fingerprint", checkpoint.fingerprint));
  TORPOR_TRY(reader.take("requests", scheduler.requests));
  TORPOR_TRY(reader.take("queues", scheduler.policy, scheduler.running, scheduler.waiting, scheduler.held,
                         scheduler.finished, scheduler.engine));
  TORPOR_TRY(reader.take("blocks", kv.num_blocks, kv.null_block, kv.groups, kv.blocks, kv.free_order, kv.engine));
  TORPOR_TRY(reader.take("prefix_index", kv.prefix_index, kv.extra_hashes));
  TORPOR_TRY(reader.take("workers", checkpoint.state.workers));
  TORPOR_TRY(reader.take("outputs", checkpoint.outputs));
  return checkpoint;
}

}  // namespace torpor
