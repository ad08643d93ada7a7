#include "checkpoint/format_v2.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>
#include <boost/filesystem.hpp>

#include "checkpoint/archived_values.h"
#include "checkpoint/refs_codec.h"
#include "checkpoint/store_names.h"

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
    std::string name = i == 0 ? file.name : fmt::format("{}/{}", generation_name(file.generation), file.name);
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

Result<std::unique_ptr<File>> open_file(FileSystem& file_system, const Directory& directory, const LinkedFile& file,
                                        const Key* key) {
  const size_t slash = file.name.find('/');
  if (slash == std::string::npos) return directory.open_file(file.name, FileIo::kFastest);
  const std::string generation = file.name.substr(0, slash);
  const auto missing = [&](std::string_view what) {
    return Error{.code = Code::kCorruption,
                 .what = fmt::format("{} needs {}, {}", directory.path(), generation, what),
                 .next_step = "use another checkpoint"};
  };
  const std::string store_path = boost::filesystem::path(directory.path()).parent_path().string();
  TORPOR_ASSIGN(const std::unique_ptr<Directory> store, file_system.open_directory(store_path, false));
  const Result<std::unique_ptr<Directory>> earlier = store->open_directory(generation);
  if (!earlier) return missing(fmt::format("which cannot be opened: {}", earlier.error().what));
  TORPOR_ASSIGN(const OpenedManifest theirs, read_manifest(**earlier, key));
  if (theirs.manifest.id != file.id) return missing("but another one than that is there");
  return (*earlier)->open_file(file.name.substr(slash + 1), FileIo::kFastest);
}

std::vector<uint64_t> needs(const Manifest& manifest) {
  std::set<uint64_t> generations;
  if (manifest.format_version != kOldestFormatVersion) return {};
  for (const RankSummary& rank : manifest.ranks) {
    for (const LinkedFile& file : rank.files) {
      const size_t slash = file.name.find('/');
      if (slash == std::string::npos) continue;
      if (const auto generation = generation_of(file.name.substr(0, slash))) generations.insert(*generation);
    }
  }
  return {generations.begin(), generations.end()};
}

}  // namespace torpor::format_v2
