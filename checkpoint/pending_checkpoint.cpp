// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/pending_checkpoint.h"

#include <algorithm>

#include <fmt/core.h>

#include "base/log.h"
#include "base/units.h"
#include "checkpoint/manifest_codec.h"
#include "checkpoint/refs_codec.h"
#include "checkpoint/state_sections.h"
#include "checkpoint/store_contents.h"
#include "checkpoint/store_names.h"
#include "offload/codec.h"

namespace torpor {
namespace {

constexpr uint64_t kSpareBytes = 4 * kMiB;  // for directories, the manifest, and the file system's own needs

}  // namespace

Status CheckpointManagerOptions::validate() const {
  const auto invalid = [](std::string what, std::string next) {
    return Error{.code = Code::kInvalidArgument, .what = std::move(what), .next_step = std::move(next)};
  };
  if (retention.keep < 1)
    return invalid(fmt::format("{} checkpoints are to be kept", retention.keep), "keep at least 1");
  if (retention.max_age_seconds && !(*retention.max_age_seconds >= 0))
    return invalid("the age of checkpoints to keep is negative", "use 0 or more seconds");
  if (encrypt && key == nullptr) return invalid("checkpoints are to be encrypted, but there is no key", "set key_file");
  return compression.validate();
}

RankWriting writing_of(const Directory& store, const std::vector<uint64_t>& generations,
                       const CheckpointManagerOptions& options) {
  RankWriting writing{.compression = options.compression};
  if (options.key != nullptr)
    writing.protection = options.encrypt ? Protection::kEncrypted : Protection::kAuthenticated;
  if (!options.incremental || generations.empty()) return writing;
  const std::string newest = generation_name(generations.back());
  const Result<OpenedManifest> base = [&]() -> Result<OpenedManifest> {
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> directory, store.open_directory(newest));
    return read_manifest(*directory, options.key.get());
  }();
  if (!base) {
    log().warn("not incremental this time: {}", base.error());
  } else if (base->manifest.protection == writing.protection) {
    writing.base = fmt::format("{}/{}", store.path(), newest);
    writing.base_id = base->manifest.id;
  }
  return writing;
}

struct PendingCheckpoint::Impl {
  FileSystem& file_system;
  std::unique_ptr<Directory> store;
  std::unique_ptr<Directory> staging;
  std::unique_ptr<File> lock;
  std::string staging_name;
  CheckpointManagerOptions options;
  RankWriting writing;
  std::unique_ptr<Seal> seal;  // null: none
  Manifest manifest;
  std::optional<Digest> owner;  // none: owner_of() the fingerprint
  bool rename_begun = false;    // and not withdrawn; true even if the rename failed
  bool committed = false;

  ~Impl() {
    if (committed || staging == nullptr) return;
    const Status done = try_catch([this]() -> Status {
      staging.reset();
      return store->remove_tree(staging_name);
    });
    if (done) return;
    (void)try_catch([&]() -> Status {
      log().warn("an unfinished checkpoint could not be removed, the next one will: {}", done.error());
      return ok();
    });
  }

  Status write(std::vector<Section>& sections);
  Status check_seen(size_t rank, const std::string& name, const std::string& host) const;
  Status check_written(int32_t rank, const std::string& name, uint64_t bytes) const;
  Result<std::string> commit();
  Status withdraw();
};

PendingCheckpoint::PendingCheckpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PendingCheckpoint::PendingCheckpoint(PendingCheckpoint&&) noexcept = default;
PendingCheckpoint& PendingCheckpoint::operator=(PendingCheckpoint&&) noexcept = default;
PendingCheckpoint::~PendingCheckpoint() = default;

Result<PendingCheckpoint> PendingCheckpoint::begin(FileSystem& file_system, std::unique_ptr<Directory> store,
                                                   std::unique_ptr<File> lock, CheckpointManagerOptions options,
                                                   uint64_t expected_bytes) {
  std::unique_ptr<PendingCheckpoint::Impl> pending(new PendingCheckpoint::Impl{
      .file_system = file_system, .store = std::move(store), .lock = std::move(lock), .options = std::move(options)});
  TORPOR_RETURN_IF_ERROR(remove_leftovers(*pending->store));
  TORPOR_ASSIGN_OR_RETURN(const std::vector<uint64_t> generations, generations_in(*pending->store));
  const Key* const key = pending->options.key.get();
  Manifest& manifest = pending->manifest;
  manifest.id = random_seal_id();
  manifest.generation = generations.empty() ? 1 : generations.back() + 1;
  manifest.created_unix_seconds = pending->options.clock->unix_seconds();
  manifest.creator = "torpor " TORPOR_VERSION;
  pending->writing = writing_of(*pending->store, generations, pending->options);
  pending->writing.id = manifest.id;
  manifest.protection = pending->writing.protection;
  if (key != nullptr) pending->seal = std::make_unique<Seal>(*key, manifest.id, manifest.protection);
  TORPOR_ASSIGN_OR_RETURN(const uint64_t free, pending->store->free_bytes());
  if (!pending->writing.base.empty()) expected_bytes = 0;  // far less may be written
  if (expected_bytes > free || free - expected_bytes < kSpareBytes) {
    return Error{.code = Code::kResourceExhausted,
                 .what = fmt::format("the checkpoint needs {} bytes, {} has {} free", expected_bytes + kSpareBytes,
                                     pending->store->path(), free),
                 .next_step = "free disk space or choose another directory"};
  }
  std::string staging_name = fmt::format("{}{:06}", kStagingPrefix, manifest.generation);
  TORPOR_ASSIGN_OR_RETURN(pending->staging, pending->store->create_directory(staging_name));
  pending->staging_name = std::move(staging_name);
  return PendingCheckpoint(std::move(pending));
}

uint64_t PendingCheckpoint::generation() const { return impl_->manifest.generation; }
const std::string& PendingCheckpoint::staging_path() const { return impl_->staging->path(); }
const RankWriting& PendingCheckpoint::writing() const { return impl_->writing; }

Status PendingCheckpoint::write_state(const EngineCheckpoint& checkpoint) {
  return try_catch([&] { return write_state(checkpoint.fingerprint, encode(checkpoint)); });
}

Status PendingCheckpoint::write_state(const Fingerprint& fingerprint, std::vector<Section> sections) {
  return try_catch([&] {
    impl_->manifest.fingerprint = fingerprint;
    return impl_->write(sections);
  });
}

Status PendingCheckpoint::Impl::write(std::vector<Section>& sections) {
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, staging->create_file(kStateFile));
  uint64_t total = 0;
  for (const Section& section : sections) total += section.bytes.size();
  ProgressMeter progress(options.progress, "writing the state", total, *options.clock);
  uint64_t offset = 0;
  for (Section& section : sections) {
    TORPOR_RETURN_IF_ERROR(progress.add(section.bytes.size()));
    SectionInfo info{
        .name = section.name, .required = section.required, .offset = offset, .bytes = section.bytes.size()};
    std::optional<Bytes> packed = compress(std::as_bytes(std::span(section.bytes)));
    if (packed && info.bytes <= packed->size() * kMostExpansion) {
      info.codec = Codec::kZstd;
      section.bytes = std::move(*packed);
    }
    const auto stored = std::as_writable_bytes(std::span(section.bytes));
    info.stored_bytes = stored.size();
    if (seal != nullptr) info.seal = seal->seal(stored, stored, section_place(info));
    info.digest = digest_of(stored);
    TORPOR_RETURN_IF_ERROR(file->pwrite(stored, offset));
    offset += stored.size();
    section.bytes = {};
    manifest.sections.push_back(std::move(info));
  }
  return file->sync();  // commit() makes the file's directory entry durable
}

Result<std::unique_ptr<RankWriter>> PendingCheckpoint::create_rank(int32_t rank, uint64_t expected_bytes) {
  return try_catch([&]() -> Result<std::unique_ptr<RankWriter>> {
    std::shared_ptr<ProgressMeter> progress;
    if (impl_->options.progress) {
      progress =
          std::make_shared<ProgressMeter>(impl_->options.progress, fmt::format("writing the chunks of rank {}", rank),
                                          expected_bytes, *impl_->options.clock);
    }
    return RankWriter::create(impl_->file_system, staging_path(), impl_->writing, rank, impl_->options.key,
                              std::move(progress));
  });
}

Status PendingCheckpoint::check_test_files(const std::vector<std::string>& hosts) {
  return try_catch([&]() -> Status {
    for (size_t rank = 0; rank < hosts.size(); ++rank) {
      const std::string test_file = test_file_name(static_cast<int32_t>(rank));
      TORPOR_RETURN_IF_ERROR(impl_->check_seen(rank, test_file, hosts[rank]));
      TORPOR_RETURN_IF_ERROR(impl_->staging->remove_file(test_file));
    }
    return ok();
  });
}

Status PendingCheckpoint::check_chunk_files(size_t ranks) const {
  return try_catch([&]() -> Status {
    for (size_t rank = 0; rank < ranks; ++rank)
      TORPOR_RETURN_IF_ERROR(impl_->check_seen(rank, chunk_file_name(static_cast<int32_t>(rank)), {}));
    return ok();
  });
}

// Check that this process sees the file that the rank wrote. `host`: of the rank; empty: unknown.
Status PendingCheckpoint::Impl::check_seen(size_t rank, const std::string& name, const std::string& host) const {
  const Result<std::unique_ptr<File>> file = staging->open_file(name);
  if (file) return ok();
  if (file.error().code != Code::kNotFound) return file.error();
  return Error{.code = Code::kFailedPrecondition,
               .what = fmt::format("rank {}{} writes into a directory of its own at {}: its {} is not seen here", rank,
                                   host.empty() ? "" : fmt::format(" on the host {}", host), staging->path(), name),
               .next_step = kShareIt};
}

void PendingCheckpoint::add_rank(RankSummary rank) { impl_->manifest.ranks.push_back(std::move(rank)); }

void PendingCheckpoint::set_fingerprint(Fingerprint fingerprint) {
  impl_->manifest.fingerprint = std::move(fingerprint);
}

void PendingCheckpoint::set_owner(const Digest& owner) { impl_->owner = owner; }

Result<std::string> PendingCheckpoint::commit() {
  return try_catch([&] { return impl_->commit(); });
}

void PendingCheckpoint::retire_older() noexcept {
  const Result<std::vector<std::string>> gone = try_catch([&] {
    const CheckpointManagerOptions& options = impl_->options;
    return retire(*impl_->store, options.key.get(), options.retention, options.clock->unix_seconds(), false,
                  impl_->manifest.owner);
  });
  if (gone) return;
  (void)try_catch([&]() -> Status {
    log().warn("older checkpoints could not be removed, the next one will try again: {}", gone.error());
    return ok();
  });
}

Result<std::unique_ptr<File>> PendingCheckpoint::hold_asleep() {
  return try_catch([this]() -> Result<std::unique_ptr<File>> {
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> committed,
                            impl_->store->open_directory(generation_name(impl_->manifest.generation)));
    return committed->lock(kAsleepFile);
  });
}

Status PendingCheckpoint::withdraw() {
  if (!impl_->rename_begun) return ok();
  const auto try_once = [this] { return try_catch([this] { return impl_->withdraw(); }); };
  if (try_once()) return ok();
  return try_once();
}

Status PendingCheckpoint::Impl::withdraw() {
  const Result<std::string> hidden = hide_generation(*store, manifest.generation);
  if (!hidden && hidden.error().code != Code::kNotFound) return hidden.error();
  if (!hidden) TORPOR_RETURN_IF_ERROR(store->sync());  // it is already hidden; make that durable
  rename_begun = false;
  // If this fails, the next writer removes it.
  if (hidden) (void)try_catch([&] { return store->remove_tree(*hidden); });
  return ok();
}

Status PendingCheckpoint::Impl::check_written(int32_t rank, const std::string& name, uint64_t bytes) const {
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, staging->open_file(name));
  TORPOR_ASSIGN_OR_RETURN(const uint64_t size, file->size());
  if (size == bytes) return ok();
  return Error{.code = Code::kIo,
               .what = fmt::format("{} has {} bytes, rank {} wrote {}", file->name(), size, rank, bytes),
               .next_step = "all ranks must write to the same file system"};
}

Result<std::string> PendingCheckpoint::Impl::commit() {
  if (manifest.sections.empty()) return Error{.code = Code::kInternal, .what = "commit() before write_state()"};
  manifest.owner = owner ? *owner : owner_of(manifest.fingerprint);
  std::sort(manifest.ranks.begin(), manifest.ranks.end(),
            [](const RankSummary& a, const RankSummary& b) { return a.rank < b.rank; });
  for (const RankSummary& rank : manifest.ranks) {
    TORPOR_RETURN_IF_ERROR(check_written(rank.rank, rank.refs, rank.refs_bytes));
    for (const LinkedFile& file : rank.files) TORPOR_RETURN_IF_ERROR(check_written(rank.rank, file.name, file.bytes));
  }
  const std::string name = generation_name(manifest.generation);
  std::string path = fmt::format("{}/{}", store->path(), name);
  TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, staging->create_file(kManifestFile));
  const Bytes bytes = encode_manifest(manifest, seal.get());
  TORPOR_RETURN_IF_ERROR(file->pwrite(std::as_bytes(std::span(bytes)), 0));
  TORPOR_RETURN_IF_ERROR(file->sync());
  TORPOR_RETURN_IF_ERROR(staging->sync());
  rename_begun = true;
  TORPOR_RETURN_IF_ERROR(store->rename_new(staging_name, name));
  committed = true;
  if (Status synced = store->sync(); !synced) {
    // It may be durable or not, so remove it: no reader may ever use it.
    if (const Status removed = remove_generation(*store, manifest.generation); !removed) {
      log().error("an unacknowledged checkpoint is left at {}: {}", path, removed.error());
    }
    return synced.error();
  }
  return path;
}

}  // namespace torpor
