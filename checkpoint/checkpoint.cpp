// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/checkpoint.h"

#include <algorithm>

#include <fmt/core.h>
#include <boost/filesystem.hpp>

#include "base/units.h"
#include "checkpoint/image_section.h"
#include "checkpoint/manifest_codec.h"
#include "checkpoint/refs_codec.h"
#include "checkpoint/state_sections.h"
#include "checkpoint/store_contents.h"
#include "checkpoint/store_names.h"
#include "offload/codec.h"

namespace torpor {
namespace {

constexpr uint64_t kMostMetadataBytes = 64 * 1024;  // of the section; the limits of metadata.h allow about 50 KiB

Error damaged(std::string what) {
  return Error{.code = Code::kCorruption, .what = std::move(what), .next_step = "use another checkpoint"};
}

// `state`: the name of STATE, for messages.
Result<Section> read_section(const OpenedManifest& opened, const SectionInfo& info, const std::string& state,
                             const StateReader& read) {
  Section section{.name = info.name, .required = info.required};
  Bytes stored(info.stored_bytes);
  const auto bytes = std::as_writable_bytes(std::span(stored));
  TORPOR_RETURN_IF_ERROR(read(info.offset, bytes));
  if (digest_of(bytes) != info.digest)
    return damaged(fmt::format("the section {} of {} does not match its digest", info.name, state));
  if (opened.seal != nullptr) TORPOR_RETURN_IF_ERROR(opened.seal->open(bytes, info.seal, section_place(info)));
  if (info.codec == Codec::kNone && info.bytes == info.stored_bytes) {
    section.bytes = std::move(stored);
    return section;
  }
  if (info.codec == Codec::kNone || info.bytes > (info.stored_bytes + 1) * kMostExpansion)
    return damaged(fmt::format("the section {} of {} contradicts itself", info.name, state));
  section.bytes.resize(info.bytes);
  if (Status done = decompress(info.codec, bytes, std::as_writable_bytes(std::span(section.bytes))); !done) {
    return done.error().within(fmt::format("section {}", info.name));
  }
  return section;
}

StateReader reader_of(const File& file) {
  return [&file](uint64_t offset, std::span<std::byte> room) { return file.pread(room, offset); };
}

}  // namespace

struct Checkpoint::Impl {
  std::unique_ptr<Directory> directory;
  std::shared_ptr<const Key> key;
  OpenedManifest opened;

  Result<OpenChunkFile> open(const LinkedFile& wanted, FileIo io) const;
};

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

const std::string& Checkpoint::path() const { return impl_->directory->path(); }
const Manifest& Checkpoint::manifest() const { return impl_->opened.manifest; }

Result<OpenChunkFile> Checkpoint::Impl::open(const LinkedFile& wanted, FileIo io) const {
  const Manifest& manifest = opened.manifest;
  OpenChunkFile file{.seal = opened.seal};
  if (opened.seal != nullptr && wanted.id != manifest.id)
    file.seal = std::make_shared<Seal>(*key, wanted.id, manifest.protection);
  TORPOR_ASSIGN_OR_RETURN(file.file, directory->open_file(wanted.name, io));
  TORPOR_ASSIGN_OR_RETURN(const uint64_t size, file.file->size());
  if (size != wanted.bytes)
    return damaged(fmt::format("{} has {} bytes, {} were written", file.file->name(), size, wanted.bytes));
  return file;
}

Result<RankRefs> Checkpoint::refs(const RankSummary& rank) const {
  const OpenedManifest& opened = impl_->opened;
  TORPOR_ASSIGN_OR_RETURN(const Bytes bytes, read_whole(*impl_->directory, rank.refs, rank.refs_bytes));
  Result<RankRefs> refs = decode_refs(std::as_bytes(std::span(bytes)), rank, opened.manifest.id, opened.seal.get());
  if (!refs) return refs.error().within(path());
  return refs;
}

Result<std::unique_ptr<DiskTier>> Checkpoint::open_rank(const RankSummary& rank,
                                                        std::shared_ptr<ProgressMeter> progress, FileIo io) const {
  std::vector<OpenChunkFile> files;
  for (const LinkedFile& wanted : rank.files) {
    TORPOR_ASSIGN_OR_RETURN(OpenChunkFile opened, impl_->open(wanted, io));
    files.push_back(std::move(opened));
  }
  return DiskTier::open(std::move(files), rank.rank, std::move(progress));
}

Result<std::vector<Section>> Checkpoint::read_sections() const {
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, impl_->directory->open_file(kStateFile));
  TORPOR_ASSIGN_OR_RETURN(const uint64_t size, file->size());
  uint64_t expected = 0;
  for (const SectionInfo& info : impl_->opened.manifest.sections) expected += info.stored_bytes;
  if (size != expected) return damaged(fmt::format("{} has {} bytes, {} were written", file->name(), size, expected));
  std::vector<Section> sections;
  for (const SectionInfo& info : impl_->opened.manifest.sections) {
    TORPOR_ASSIGN_OR_RETURN(Section section, read_section(impl_->opened, info, file->name(), reader_of(*file)));
    sections.push_back(std::move(section));
  }
  return sections;
}

Result<Metadata> Checkpoint::read_metadata() const {
  std::unique_ptr<File> file;
  const std::string name = fmt::format("{}/{}", path(), kStateFile);
  return torpor::read_metadata(impl_->opened, name, [&](uint64_t offset, std::span<std::byte> room) -> Status {
    TORPOR_ASSIGN_OR_RETURN(file, impl_->directory->open_file(kStateFile));
    return file->pread(room, offset);
  });
}

Result<Metadata> read_metadata(const OpenedManifest& opened, const std::string& state, const StateReader& read) {
  const std::vector<SectionInfo>& sections = opened.manifest.sections;
  const auto found =
      std::find_if(sections.begin(), sections.end(), [](const SectionInfo& info) { return is_metadata(info.name); });
  if (found == sections.end()) return Metadata{};
  if (std::max(found->stored_bytes, found->bytes) > kMostMetadataBytes)
    return damaged(
        fmt::format("the section {} has {} bytes", found->name, std::max(found->stored_bytes, found->bytes)));
  TORPOR_ASSIGN_OR_RETURN(const Section section, read_section(opened, *found, state, read));
  return decode_metadata(std::span(&section, 1));
}

Result<EngineCheckpoint> Checkpoint::read_state() const {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Section> sections, read_sections());
  TORPOR_ASSIGN_OR_RETURN(EngineCheckpoint checkpoint, decode(sections));
  checkpoint.fingerprint = impl_->opened.manifest.fingerprint;
  return checkpoint;
}

Result<Checkpoint> open_checkpoint_directory(std::unique_ptr<Directory> directory, std::shared_ptr<const Key> key) {
  std::unique_ptr<Checkpoint::Impl> impl(
      new Checkpoint::Impl{.directory = std::move(directory), .key = std::move(key)});
  TORPOR_ASSIGN_OR_RETURN(impl->opened, read_manifest(*impl->directory, impl->key.get()));
  return Checkpoint(std::move(impl));
}

Result<Checkpoint> open_latest(const Directory& store, std::shared_ptr<const Key> key) {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<uint64_t> generations, generations_in(store));
  if (generations.empty()) {
    return Error{.code = Code::kNotFound,
                 .what = fmt::format("there is no checkpoint in {}", store.path()),
                 .next_step = "name a checkpoint, or a directory of checkpoints"};
  }
  TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<Directory> directory,
                          store.open_directory(generation_name(generations.back())));
  return open_checkpoint_directory(std::move(directory), std::move(key));
}

Status check_fits(FileSystem& file_system, const Checkpoint& checkpoint, const Fingerprint& engine,
                  const std::string& named, const Key* key) {
  TORPOR_RETURN_IF_ERROR(check_is_whole_engine(checkpoint.manifest(), checkpoint.path()));
  const Status same = compare_fingerprints(checkpoint.manifest().fingerprint, engine);
  if (same) return ok();
  Error error = same.error().within(checkpoint.path());
  (void)try_catch([&]() -> Status {
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> store, file_system.open_directory(named, false));
    TORPOR_ASSIGN_OR_RETURN(const std::vector<CheckpointInfo> infos, infos_in(*store, key, Trust::kThisKey));
    for (auto info = infos.rbegin(); info != infos.rend(); ++info) {
      if (!info->readable || !compare_fingerprints(info->manifest.fingerprint, engine)) continue;
      error.next_step = fmt::format("the newest one is another engine's: name {}, which fits this one", info->path);
      break;
    }
    return ok();
  });
  return error;
}

Result<Checkpoint> open_checkpoint(FileSystem& file_system, const std::string& path, std::shared_ptr<const Key> key) {
  TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<Directory> directory, file_system.open_directory(path, false));
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Entry> entries, directory->list());
  const bool is_checkpoint =
      std::any_of(entries.begin(), entries.end(), [](const Entry& entry) { return entry.name == kManifestFile; });
  if (is_checkpoint) return open_checkpoint_directory(std::move(directory), std::move(key));
  return open_latest(*directory, std::move(key));
}

}  // namespace torpor
