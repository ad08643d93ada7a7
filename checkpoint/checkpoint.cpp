// Checkpoint: reading a committed one.
#include <algorithm>
#include <set>

#include <fmt/format.h>

#include "checkpoint/checkpoint_manager.h"
#include "checkpoint/store_names.h"
#include "offload/codec.h"
#include "offload/disk_tier.h"

namespace torpor {

struct Checkpoint::Impl {
  std::unique_ptr<Directory> directory;
  Manifest manifest;
};

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

const std::string& Checkpoint::path() const { return impl_->directory->path(); }
const Manifest& Checkpoint::manifest() const { return impl_->manifest; }

Result<std::unique_ptr<File>> Checkpoint::open_chunks(const RankChunks& rank) const {
  TORPOR_ASSIGN(std::unique_ptr<File> file, impl_->directory->open_file(rank.file));
  TORPOR_ASSIGN(const uint64_t size, file->size());
  if (size != rank.file_bytes) {
    return Error{.code = Code::kCorruption,
                 .what = fmt::format("{} has {} bytes, {} were written", file->name(), size, rank.file_bytes),
                 .next_step = "use another checkpoint"};
  }
  return file;
}

Result<EngineCheckpoint> Checkpoint::read_state() const {
  TORPOR_ASSIGN(const std::unique_ptr<File> file, impl_->directory->open_file(kStateFile));
  TORPOR_ASSIGN(const uint64_t size, file->size());
  uint64_t expected = 0;
  for (const SectionInfo& info : impl_->manifest.sections) expected += info.stored_bytes;
  if (size != expected) {
    return Error{.code = Code::kCorruption,
                 .what = fmt::format("{} has {} bytes, {} were written", file->name(), size, expected),
                 .next_step = "use another checkpoint"};
  }
  std::vector<Section> sections;
  for (const SectionInfo& info : impl_->manifest.sections) {
    Bytes stored(info.stored_bytes);
    TORPOR_TRY(file->pread(std::as_writable_bytes(std::span(stored)), info.offset));
    if (digest_of(std::as_bytes(std::span(stored))) != info.digest) {
      return Error{.code = Code::kCorruption,
                   .what = fmt::format("the section {} of {} does not match its digest", info.name, file->name()),
                   .next_step = "use another checkpoint"};
    }
    if (info.codec == Codec::kNone) {
      sections.push_back({info.name, std::move(stored)});
      continue;
    }
    Section section{info.name, Bytes(info.bytes)};  // the manifest's digest vouches for the size
    if (Status done = decompress(info.codec, std::as_bytes(std::span(stored)), std::as_writable_bytes(std::span(section.bytes))); !done) {
      return done.error().within(fmt::format("section {}", info.name));
    }
    sections.push_back(std::move(section));
  }
  return decode(sections);
}

namespace {

void verify_chunks(const Checkpoint& checkpoint, const RankChunks& rank, std::vector<Error>& problems) {
  Result<std::unique_ptr<File>> file = checkpoint.open_chunks(rank);
  if (!file) return problems.push_back(file.error());
  Result<std::unique_ptr<DiskTier>> tier = DiskTier::open(std::move(*file), rank.rank);
  if (!tier) return problems.push_back(tier.error());
  Bytes bytes;
  for (const SavedChunk& chunk : rank.chunks) {
    if (chunk.codec == Codec::kNone && chunk.bytes != chunk.stored_bytes) {
      problems.push_back(Error{.code = Code::kCorruption, .what = fmt::format("{} contradicts itself", chunk.key.to_string())});
      continue;
    }
    bytes.resize(chunk.bytes);
    if (Status done = (*tier)->get_one(chunk, std::as_writable_bytes(std::span(bytes))); !done) {
      problems.push_back(done.error());
    } else if (digest_of(std::as_bytes(std::span(bytes))) != chunk.digest) {
      problems.push_back(Error{.code = Code::kCorruption,
                               .what = fmt::format("rank {}: {} does not match its digest", rank.rank, chunk.key.to_string()),
                               .next_step = "use another checkpoint"});
    }
  }
}

// Every block that the state calls live must have been saved by every rank.
void verify_blocks(const Manifest& manifest, const KvSnapshot& kv, std::vector<Error>& problems) {
  for (const RankChunks& rank : manifest.ranks) {
    std::set<uint64_t> saved;
    for (const SavedChunk& chunk : rank.chunks) {
      if (chunk.key.kind == ChunkKind::kKvBlock) saved.insert(chunk.key.index);
    }
    for (const KvBlock& block : kv.blocks) {
      if (saved.contains(static_cast<uint64_t>(block.id))) continue;
      problems.push_back(Error{.code = Code::kCorruption,
                               .what = fmt::format("rank {}: block {} is in use but was not saved", rank.rank, block.id),
                               .next_step = "use another checkpoint"});
    }
  }
}

}  // namespace

Result<std::vector<Error>> Checkpoint::verify() const {
  std::vector<Error> problems;
  for (const RankChunks& rank : impl_->manifest.ranks) verify_chunks(*this, rank, problems);
  const Result<EngineCheckpoint> state = read_state();
  if (!state) {
    problems.push_back(state.error());
    return problems;
  }
  if (Status valid = state->state.validate(); !valid) problems.push_back(valid.error());
  verify_blocks(impl_->manifest, state->state.kv, problems);
  return problems;
}

Result<Manifest> read_manifest(Directory& directory) {
  TORPOR_ASSIGN(const std::unique_ptr<File> file, directory.open_file(kManifestFile));
  TORPOR_ASSIGN(const uint64_t size, file->size());
  constexpr uint64_t kLargest = uint64_t{1} << 30;
  if (size > kLargest) {
    return Error{.code = Code::kCorruption, .what = fmt::format("{} has {} bytes", file->name(), size), .next_step = "use another checkpoint"};
  }
  Bytes bytes(size);
  TORPOR_TRY(file->pread(std::as_writable_bytes(std::span(bytes)), 0));
  Result<Manifest> manifest = decode_manifest(std::as_bytes(std::span(bytes)));
  if (!manifest) return manifest.error().within(directory.path());
  return manifest;
}

Result<Checkpoint> open_checkpoint_directory(std::unique_ptr<Directory> directory) {
  TORPOR_ASSIGN(Manifest manifest, read_manifest(*directory));
  auto impl = std::make_unique<Checkpoint::Impl>();
  impl->directory = std::move(directory);
  impl->manifest = std::move(manifest);
  return Checkpoint(std::move(impl));
}

Result<Checkpoint> open_checkpoint(FileSystem& file_system, const std::string& path) {
  TORPOR_ASSIGN(std::unique_ptr<Directory> directory, file_system.open_directory(path, false));
  TORPOR_ASSIGN(const std::vector<Entry> entries, directory->list());
  const bool is_checkpoint = std::any_of(entries.begin(), entries.end(), [](const Entry& entry) { return entry.name == kManifestFile; });
  if (is_checkpoint) return open_checkpoint_directory(std::move(directory));
  TORPOR_ASSIGN(const std::unique_ptr<CheckpointManager> manager, CheckpointManager::open(file_system, path));
  return manager->open_latest();
}

}  // namespace torpor
