#include "checkpoint/checkpoint.h"

#include <algorithm>

#include <fmt/format.h>
#include <boost/filesystem.hpp>

#include "base/units.h"
#include "checkpoint/manifest_codec.h"
#include "checkpoint/state_sections.h"
#include "checkpoint/store_names.h"
#include "offload/codec.h"

namespace torpor {
namespace {

Error damaged(std::string what) {
  return Error{.code = Code::kCorruption, .what = std::move(what), .next_step = "use another checkpoint"};
}

}  // namespace

struct Checkpoint::Impl {
  FileSystem& file_system;
  std::unique_ptr<Directory> directory;
  std::shared_ptr<const Key> key;
  std::shared_ptr<const Seal> seal;
  Manifest manifest;

  Result<OpenChunkFile> open(const ChunkFile& wanted) const;
  Result<Section> read(const File& file, const SectionInfo& info) const;
};

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

const std::string& Checkpoint::path() const { return impl_->directory->path(); }
const Manifest& Checkpoint::manifest() const { return impl_->manifest; }

Result<OpenChunkFile> Checkpoint::Impl::open(const ChunkFile& wanted) const {
  OpenChunkFile opened{.seal = seal};
  if (wanted.generation == 0) {
    TORPOR_ASSIGN(opened.file, directory->open_file(wanted.name, FileIo::kFastest));
  } else {
    const std::string store_path = boost::filesystem::path(directory->path()).parent_path().string();
    TORPOR_ASSIGN(const std::unique_ptr<Directory> store, file_system.open_directory(store_path, false));
    Result<std::unique_ptr<Directory>> earlier = store->open_directory(generation_name(wanted.generation));
    if (!earlier)
      return damaged(fmt::format("{} needs {}, which cannot be opened: {}", directory->path(),
                                 generation_name(wanted.generation), earlier.error().what));
    Manifest theirs;
    TORPOR_ASSIGN(theirs, read_manifest(**earlier, key.get(), &opened.seal));
    if (theirs.id != wanted.id)
      return damaged(fmt::format("{} needs another {} than the one that is there", directory->path(),
                                 generation_name(wanted.generation)));
    TORPOR_ASSIGN(opened.file, (*earlier)->open_file(wanted.name, FileIo::kFastest));
  }
  TORPOR_ASSIGN(const uint64_t size, opened.file->size());
  if (size != wanted.bytes)
    return damaged(fmt::format("{} has {} bytes, {} were written", opened.file->name(), size, wanted.bytes));
  return opened;
}

Result<std::unique_ptr<DiskTier>> Checkpoint::open_rank(const RankChunks& rank,
                                                        std::shared_ptr<ProgressMeter> progress) const {
  std::vector<OpenChunkFile> files;
  for (const ChunkFile& wanted : rank.files) {
    TORPOR_ASSIGN(OpenChunkFile opened, impl_->open(wanted));
    files.push_back(std::move(opened));
  }
  return DiskTier::open(std::move(files), rank.rank, std::move(progress));
}

Result<Section> Checkpoint::Impl::read(const File& file, const SectionInfo& info) const {
  Section section{.name = info.name, .required = info.required};
  Bytes stored(info.stored_bytes);
  const auto bytes = std::as_writable_bytes(std::span(stored));
  TORPOR_TRY(file.pread(bytes, info.offset));
  if (digest_of(bytes) != info.digest)
    return damaged(fmt::format("the section {} of {} does not match its digest", info.name, file.name()));
  if (seal != nullptr) TORPOR_TRY(seal->open(bytes, info.seal, section_place(info)));
  if (info.codec == Codec::kNone && info.bytes == info.stored_bytes) {
    section.bytes = std::move(stored);
    return section;
  }
  if (info.codec == Codec::kNone || info.bytes > (info.stored_bytes + 1) * kMostExpansion)
    return damaged(fmt::format("the section {} of {} contradicts itself", info.name, file.name()));
  section.bytes.resize(info.bytes);
  if (Status done = decompress(info.codec, bytes, std::as_writable_bytes(std::span(section.bytes))); !done) {
    return done.error().within(fmt::format("section {}", info.name));
  }
  return section;
}

Result<std::vector<Section>> Checkpoint::read_sections() const {
  TORPOR_ASSIGN(const std::unique_ptr<File> file, impl_->directory->open_file(kStateFile));
  TORPOR_ASSIGN(const uint64_t size, file->size());
  uint64_t expected = 0;
  for (const SectionInfo& info : impl_->manifest.sections) expected += info.stored_bytes;
  if (size != expected) return damaged(fmt::format("{} has {} bytes, {} were written", file->name(), size, expected));
  std::vector<Section> sections;
  for (const SectionInfo& info : impl_->manifest.sections) {
    TORPOR_ASSIGN(Section section, impl_->read(*file, info));
    sections.push_back(std::move(section));
  }
  return sections;
}

Result<EngineCheckpoint> Checkpoint::read_state() const {
  TORPOR_ASSIGN(const std::vector<Section> sections, read_sections());
  TORPOR_ASSIGN(EngineCheckpoint checkpoint, decode(sections));
  checkpoint.fingerprint = impl_->manifest.fingerprint;
  return checkpoint;
}

Result<Checkpoint> open_checkpoint_directory(FileSystem& file_system, std::unique_ptr<Directory> directory,
                                             std::shared_ptr<const Key> key) {
  std::unique_ptr<Checkpoint::Impl> impl(
      new Checkpoint::Impl{.file_system = file_system, .directory = std::move(directory), .key = std::move(key)});
  TORPOR_ASSIGN(impl->manifest, read_manifest(*impl->directory, impl->key.get(), &impl->seal));
  return Checkpoint(std::move(impl));
}

Result<Checkpoint> open_latest(FileSystem& file_system, const Directory& store, std::shared_ptr<const Key> key) {
  TORPOR_ASSIGN(const std::vector<uint64_t> generations, generations_in(store));
  if (generations.empty()) {
    return Error{.code = Code::kNotFound,
                 .what = fmt::format("there is no checkpoint in {}", store.path()),
                 .next_step = "name a checkpoint, or a directory of checkpoints"};
  }
  TORPOR_ASSIGN(std::unique_ptr<Directory> directory, store.open_directory(generation_name(generations.back())));
  return open_checkpoint_directory(file_system, std::move(directory), std::move(key));
}

Result<Checkpoint> open_checkpoint(FileSystem& file_system, const std::string& path, std::shared_ptr<const Key> key) {
  TORPOR_ASSIGN(std::unique_ptr<Directory> directory, file_system.open_directory(path, false));
  TORPOR_ASSIGN(const std::vector<Entry> entries, directory->list());
  const bool is_checkpoint =
      std::any_of(entries.begin(), entries.end(), [](const Entry& entry) { return entry.name == kManifestFile; });
  if (is_checkpoint) return open_checkpoint_directory(file_system, std::move(directory), std::move(key));
  return open_latest(file_system, *directory, std::move(key));
}

}  // namespace torpor
