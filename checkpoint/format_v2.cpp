#include "checkpoint/format_v2.h"

#include <algorithm>
#include <set>

#include <fmt/core.h>

#include "checkpoint/archived_values.h"
#include "checkpoint/refs_codec.h"

namespace torpor::format_v2 {
namespace {

struct ChunkFile {
  uint64_t generation = 0;  // 0: of this checkpoint
  SealId id{};              // of the earlier checkpoint
  std::string name;
  uint64_t bytes = 0;
};
struct RankChunks {
  int32_t rank = 0;
  std::vector<ChunkFile> files;
  std::vector<SavedChunk> chunks;
};
struct Body {
  Manifest manifest;
  std::vector<RankChunks> ranks;
};

template <class Archive>
void serialize(Archive& archive, ChunkFile& v) {
  archive(v.generation, v.id, v.name, v.bytes);
}
template <class Archive>
void serialize(Archive& archive, RankChunks& v) {
  archive(v.rank, v.files, v.chunks);
}
template <class Archive>
void serialize(Archive& archive, Body& v) {
  Manifest& m = v.manifest;
  archive(m.generation, m.created_unix_seconds, m.creator, m.fingerprint, m.sections, v.ranks);
}

Result<RankRefs> refs_of(RankChunks& rank, uint64_t generation, const SealId& id) {
  const auto wrong = [&](std::string_view what) {
    return damaged_manifest(fmt::format("rank {}: {}", rank.rank, what));
  };
  if (rank.files.empty()) return wrong("it has no file of its own");
  RankRefs refs{.rank = rank.rank, .records = std::move(rank.chunks)};
  std::set<std::string> names;
  for (size_t i = 0; i < rank.files.size(); ++i) {
    const ChunkFile& file = rank.files[i];
    if (!is_plain_name(file.name)) return wrong("the name of a file is not a plain name");
    if ((file.generation == 0) != (i == 0) || file.generation >= std::max<uint64_t>(generation, 1))
      return wrong(fmt::format("file {} is of generation {}", i, file.generation));
    std::string name = i == 0 ? file.name : fmt::format("g-{:06}/{}", file.generation, file.name);
    if (!names.insert(name).second) return wrong(fmt::format("the file {} is listed twice", name));
    refs.files.push_back({.name = std::move(name), .id = i == 0 ? id : file.id, .bytes = file.bytes});
  }
  TORPOR_TRY(check_records(refs, "MANIFEST"));
  return refs;
}

}  // namespace

Status decode_body(std::span<const std::byte> bytes, const SealId& id, OpenedManifest& opened) {
  TORPOR_ASSIGN(Body body, from_bytes<Body>(bytes, "MANIFEST"));
  opened.manifest = std::move(body.manifest);
  TORPOR_TRY(check_sections(opened.manifest));
  std::set<int32_t> ranks;
  for (RankChunks& rank : body.ranks) {
    if (rank.rank < 0 || !ranks.insert(rank.rank).second)
      return damaged_manifest(fmt::format("the rank {} is listed twice", rank.rank));
    TORPOR_ASSIGN(RankRefs refs, refs_of(rank, opened.manifest.generation, id));
    opened.manifest.ranks.push_back(summary_of(refs));
    opened.refs.push_back(std::move(refs));
  }
  return ok();
}

}  // namespace torpor::format_v2
