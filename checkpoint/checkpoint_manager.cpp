#include "checkpoint/checkpoint_manager.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/log.h"
#include "base/units.h"
#include "checkpoint/manifest_codec.h"
#include "checkpoint/retention.h"
#include "checkpoint/state_sections.h"
#include "checkpoint/store_names.h"
#include "offload/codec.h"

namespace torpor {

namespace {

constexpr uint64_t kSpareBytes = 4 * kMiB;  // for directories, the manifest and what a file system needs itself

bool is_leftover(const Entry& entry) {
  return entry.name.starts_with(kStagingPrefix) || entry.name.starts_with(kTrashPrefix);
}

// Away from its name first, durably, so that a half-removed checkpoint is never seen as one.
Status remove_generation(Directory& store, uint64_t generation) {
  const std::string name = generation_name(generation);
  const std::string doomed = fmt::format("{}{}", kTrashPrefix, name);
  TORPOR_TRY(store.rename_new(name, doomed));
  TORPOR_TRY(store.sync());
  return store.remove_tree(doomed);
}

// What a killed writer left. Precondition: the lock is held.
Status remove_leftovers(Directory& store) {
  TORPOR_ASSIGN(const std::vector<Entry> entries, store.list());
  for (const Entry& entry : entries) {
    if (is_leftover(entry)) TORPOR_TRY(store.remove_tree(entry.name));
  }
  return ok();
}

// What is only kept or removed need not be sealed with today's key: those from before it was set go their way too.
enum class Trust : uint8_t { kThisKey, kAnySeal };

CheckpointInfo info_of(Directory& store, uint64_t generation, const Key* key, Trust trust) {
  CheckpointInfo info{.name = generation_name(generation)};
  info.path = fmt::format("{}/{}", store.path(), info.name);
  Result<Manifest> manifest = [&]() -> Result<Manifest> {
    TORPOR_ASSIGN(const std::unique_ptr<Directory> directory, store.open_directory(info.name));
    info.woken = directory->open_file(kWokenFile).has_value();
    Result<Manifest> read = read_manifest(*directory, key);
    if (!read && trust == Trust::kAnySeal && key != nullptr && read.error().code == Code::kUnauthenticated)
      read = read_manifest(*directory);
    return read;
  }();
  info.readable = manifest.has_value();
  if (!manifest) {
    info.problem = manifest.error();
    return info;
  }
  info.bytes = manifest->total_bytes();
  info.ranks = manifest->ranks.size();
  info.needs = manifest->needs();
  info.manifest = std::move(*manifest);
  info.manifest.sections.clear();
  info.manifest.ranks.clear();
  return info;
}

Result<std::vector<CheckpointInfo>> infos_in(Directory& store, const Key* key, Trust trust) {
  TORPOR_ASSIGN(const std::vector<uint64_t> generations, generations_in(store));
  std::vector<CheckpointInfo> infos;
  for (const uint64_t generation : generations) infos.push_back(info_of(store, generation, key, trust));
  return infos;
}

// The chunks of the newest checkpoint, if this one can build on it; none is no failure, all is written then.
std::vector<RankChunks> known_in(const Directory& store, uint64_t generation, const Key* key, Protection protection) {
  const Result<Manifest> base = [&]() -> Result<Manifest> {
    TORPOR_ASSIGN(const std::unique_ptr<Directory> directory, store.open_directory(generation_name(generation)));
    return read_manifest(*directory, key);
  }();
  if (!base) log().warn("not incremental this time: {}", base.error().to_string());
  const bool fits = base && base->format_version == kFormatVersion && base->protection == protection;
  return fits ? known_chunks(*base) : std::vector<RankChunks>{};
}

// Precondition: the lock is held. What nobody needs goes first, so that a kill in between leaves no one incomplete.
Result<std::vector<std::string>> retire(Directory& store, const CheckpointManagerOptions& options, bool dry_run) {
  TORPOR_ASSIGN(const std::vector<CheckpointInfo> infos, infos_in(store, options.key.get(), Trust::kAnySeal));
  std::vector<uint64_t> gone = retired(infos, options.retention, options.clock->unix_seconds());
  std::vector<std::string> names;
  for (auto generation = gone.rbegin(); generation != gone.rend(); ++generation) {  // needs point to older ones
    if (!dry_run) TORPOR_TRY(remove_generation(store, *generation));
    names.push_back(generation_name(*generation));
  }
  return names;
}

}  // namespace

struct PendingCheckpoint::Impl {
  std::unique_ptr<Directory> store;
  std::unique_ptr<Directory> staging;
  std::unique_ptr<File> lock;
  std::string staging_name;
  CheckpointManagerOptions options;
  ChunkWriting writing;
  std::unique_ptr<Seal> seal;  // null: none
  Manifest manifest;
  bool visible = false;  // or perhaps: the call that makes it so was begun
  bool committed = false;

  ~Impl() {
    if (committed || staging == nullptr) return;
    const Status done = catching([this]() -> Status {
      staging.reset();
      return store->remove_tree(staging_name);
    });
    if (done) return;
    (void)catching([&]() -> Status {
      log().warn("an unfinished checkpoint could not be removed, the next one will: {}", done.error().to_string());
      return ok();
    });
  }

  Status write(std::vector<Section>& sections);
  Result<std::string> commit();
};

PendingCheckpoint::PendingCheckpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PendingCheckpoint::PendingCheckpoint(PendingCheckpoint&&) noexcept = default;
PendingCheckpoint& PendingCheckpoint::operator=(PendingCheckpoint&&) noexcept = default;
PendingCheckpoint::~PendingCheckpoint() = default;

uint64_t PendingCheckpoint::generation() const { return impl_->manifest.generation; }
const std::string& PendingCheckpoint::staging_path() const { return impl_->staging->path(); }
const ChunkWriting& PendingCheckpoint::writing() const { return impl_->writing; }

Status PendingCheckpoint::write_state(const EngineCheckpoint& checkpoint) {
  return catching([&] { return write_state(checkpoint.fingerprint, encode(checkpoint)); });
}

Status PendingCheckpoint::write_state(const Fingerprint& fingerprint, std::vector<Section> sections) {
  return catching([&] {
    impl_->manifest.fingerprint = fingerprint;
    return impl_->write(sections);
  });
}

Status PendingCheckpoint::Impl::write(std::vector<Section>& sections) {
  TORPOR_ASSIGN(const std::unique_ptr<File> file, staging->create_file(kStateFile));
  uint64_t total = 0;
  for (const Section& section : sections) total += section.bytes.size();
  ProgressMeter progress(options.progress, "writing the state", total, *options.clock);
  uint64_t offset = 0;
  for (Section& section : sections) {
    TORPOR_TRY(progress.add(section.bytes.size()));
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
    TORPOR_TRY(file->pwrite(stored, offset));
    offset += stored.size();
    section.bytes = {};
    manifest.sections.push_back(std::move(info));
  }
  return file->sync();  // its entry in the directory is made durable by commit()
}

Result<std::unique_ptr<DiskTier>> PendingCheckpoint::create_chunks(int32_t rank, uint64_t expected_bytes) {
  return catching([&]() -> Result<std::unique_ptr<DiskTier>> {
    TORPOR_ASSIGN(ChunkFileOptions options, chunk_file_options(impl_->writing, rank, impl_->options.key.get()));
    if (impl_->options.progress) {
      options.progress =
          std::make_shared<ProgressMeter>(impl_->options.progress, fmt::format("writing the chunks of rank {}", rank),
                                          expected_bytes, *impl_->options.clock);
    }
    return DiskTier::create(*impl_->staging, chunk_file_name(rank), std::move(options));
  });
}

void PendingCheckpoint::add_rank(RankChunks chunks) { impl_->manifest.ranks.push_back(std::move(chunks)); }

void PendingCheckpoint::set_fingerprint(Fingerprint fingerprint) {
  impl_->manifest.fingerprint = std::move(fingerprint);
}

Result<std::string> PendingCheckpoint::commit() {
  return catching([&] { return impl_->commit(); });
}

void PendingCheckpoint::retire_older() noexcept {
  const Result<std::vector<std::string>> gone = catching([&] { return retire(*impl_->store, impl_->options, false); });
  if (gone) return;
  (void)catching([&]() -> Status {
    log().warn("older checkpoints could not be removed, the next one will try again: {}", gone.error().to_string());
    return ok();
  });
}

Status PendingCheckpoint::withdraw() {
  if (!impl_->visible) return ok();
  return catching([this]() -> Status {
    const Status removed = remove_generation(*impl_->store, impl_->manifest.generation);
    if (removed || removed.error().code != Code::kNotFound) return removed;
    return impl_->store->sync();  // it is out of sight; is that durable?
  });
}

Result<std::string> PendingCheckpoint::Impl::commit() {
  if (manifest.sections.empty()) return Error{.code = Code::kInternal, .what = "commit() before write_state()"};
  std::sort(manifest.ranks.begin(), manifest.ranks.end(),
            [](const RankChunks& a, const RankChunks& b) { return a.rank < b.rank; });
  for (const RankChunks& rank : manifest.ranks) {
    TORPOR_ASSIGN(const std::unique_ptr<File> file, staging->open_file(rank.files.at(0).name));
    TORPOR_ASSIGN(const uint64_t size, file->size());
    if (size != rank.files[0].bytes) {
      return Error{
          .code = Code::kIo,
          .what = fmt::format("{} has {} bytes, rank {} wrote {}", file->name(), size, rank.rank, rank.files[0].bytes),
          .next_step = "all ranks must write to the same file system"};
    }
  }
  const std::string name = generation_name(manifest.generation);
  std::string path = fmt::format("{}/{}", store->path(), name);
  TORPOR_ASSIGN(const std::unique_ptr<File> file, staging->create_file(kManifestFile));
  const Bytes bytes = encode_manifest(manifest, seal.get());
  TORPOR_TRY(file->pwrite(std::as_bytes(std::span(bytes)), 0));
  TORPOR_TRY(file->sync());
  TORPOR_TRY(staging->sync());
  visible = true;
  TORPOR_TRY(store->rename_new(staging_name, name));
  committed = true;
  if (Status synced = store->sync(); !synced) {
    // Perhaps durable, perhaps not: nobody may ever believe it.
    if (const Status removed = remove_generation(*store, manifest.generation); !removed) {
      log().error("an unacknowledged checkpoint is left at {}: {}", path, removed.error().to_string());
    }
    return synced.error();
  }
  return path;
}

struct CheckpointManager::Impl {
  FileSystem& file_system;
  std::string directory;
  CheckpointManagerOptions options;

  struct Opened {
    std::unique_ptr<Directory> store;
    std::unique_ptr<File> lock;  // null: only for reading
  };
  Result<Opened> for_reading() const {
    Opened opened;
    TORPOR_ASSIGN(opened.store, file_system.open_directory(directory, false));
    return opened;
  }
  Result<Opened> locked(bool create) const {
    Opened opened;
    TORPOR_ASSIGN(opened.store, file_system.open_directory(directory, create));
    TORPOR_ASSIGN(opened.lock, opened.store->lock(kLockFile));
    return opened;
  }
};

CheckpointManager::CheckpointManager(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CheckpointManager::~CheckpointManager() = default;

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

Result<std::unique_ptr<CheckpointManager>> CheckpointManager::open(FileSystem& file_system, std::string directory,
                                                                   CheckpointManagerOptions options) {
  if (directory.empty())
    return Error{.code = Code::kInvalidArgument,
                 .what = "the directory for checkpoints is empty",
                 .next_step = "set dir (or TORPOR_DIR)"};
  TORPOR_TRY(options.validate());
  if (options.clock == nullptr) options.clock = &system_clock();
  return std::unique_ptr<CheckpointManager>(
      new CheckpointManager(std::unique_ptr<Impl>(new Impl{file_system, std::move(directory), std::move(options)})));
}

Result<PendingCheckpoint> CheckpointManager::begin(uint64_t expected_bytes) {
  return catching([&]() -> Result<PendingCheckpoint> {
    TORPOR_ASSIGN(Impl::Opened locked, impl_->locked(true));
    std::unique_ptr<PendingCheckpoint::Impl> pending(new PendingCheckpoint::Impl{
        .store = std::move(locked.store), .lock = std::move(locked.lock), .options = impl_->options});
    TORPOR_TRY(remove_leftovers(*pending->store));
    TORPOR_ASSIGN(const uint64_t free, pending->store->free_bytes());
    if (expected_bytes > free || free - expected_bytes < kSpareBytes) {
      return Error{.code = Code::kResourceExhausted,
                   .what = fmt::format("the checkpoint needs {} bytes, {} has {} free", expected_bytes + kSpareBytes,
                                       impl_->directory, free),
                   .next_step = "free disk space or choose another directory"};
    }
    TORPOR_ASSIGN(const std::vector<uint64_t> generations, generations_in(*pending->store));
    Manifest& manifest = pending->manifest;
    manifest.id = random_seal_id();
    manifest.generation = generations.empty() ? 1 : generations.back() + 1;
    manifest.created_unix_seconds = impl_->options.clock->unix_seconds();
    manifest.creator = "torpor " TORPOR_VERSION;
    if (impl_->options.key != nullptr) {
      manifest.protection = impl_->options.encrypt ? Protection::kEncrypted : Protection::kAuthenticated;
      pending->seal = std::make_unique<Seal>(*impl_->options.key, manifest.id, manifest.protection);
    }
    pending->writing = {
        .id = manifest.id, .protection = manifest.protection, .compression = impl_->options.compression};
    const bool whole = manifest.generation % kIncrementalRun == 0;
    if (impl_->options.incremental && !generations.empty() && !whole)
      pending->writing.known =
          known_in(*pending->store, generations.back(), impl_->options.key.get(), manifest.protection);
    std::string staging_name = fmt::format("{}{:06}", kStagingPrefix, manifest.generation);
    TORPOR_ASSIGN(pending->staging, pending->store->create_directory(staging_name));
    pending->staging_name = std::move(staging_name);
    return PendingCheckpoint(std::move(pending));
  });
}

Status CheckpointManager::remove(uint64_t generation, bool dry_run) {
  return catching([&]() -> Status {
    TORPOR_ASSIGN(const Impl::Opened opened, dry_run ? impl_->for_reading() : impl_->locked(false));
    TORPOR_ASSIGN(const std::vector<CheckpointInfo> infos,
                  infos_in(*opened.store, impl_->options.key.get(), Trust::kAnySeal));
    const auto found = std::find_if(infos.begin(), infos.end(), [&](const CheckpointInfo& info) {
      return info.name == generation_name(generation);
    });
    if (found == infos.end())
      return Error{.code = Code::kNotFound,
                   .what = fmt::format("there is no {} in {}", generation_name(generation), impl_->directory),
                   .next_step = "see torpor ls"};
    for (const CheckpointInfo& info : infos) {
      if (std::find(info.needs.begin(), info.needs.end(), generation) == info.needs.end()) continue;
      return Error{.code = Code::kFailedPrecondition,
                   .what = fmt::format("{} needs chunks of {}", info.name, generation_name(generation)),
                   .next_step = fmt::format("remove {} first", info.name)};
    }
    return dry_run ? ok() : remove_generation(*opened.store, generation);
  });
}

Status CheckpointManager::woken_from(uint64_t generation) {
  return catching([&]() -> Status {
    TORPOR_ASSIGN(const Impl::Opened locked, impl_->locked(false));
    TORPOR_ASSIGN(const std::unique_ptr<Directory> directory,
                  locked.store->open_directory(generation_name(generation)));
    if (!directory->open_file(kWokenFile)) {
      TORPOR_ASSIGN(const std::unique_ptr<File> mark, directory->create_file(kWokenFile));
      TORPOR_TRY(mark->sync());
      TORPOR_TRY(directory->sync());
    }
    TORPOR_TRY(retire(*locked.store, impl_->options, false));
    return ok();
  });
}

Result<std::vector<std::string>> CheckpointManager::collect(bool dry_run) {
  return catching([&]() -> Result<std::vector<std::string>> {
    TORPOR_ASSIGN(const Impl::Opened opened, dry_run ? impl_->for_reading() : impl_->locked(false));
    std::vector<std::string> gone;
    TORPOR_ASSIGN(const std::vector<Entry> entries, opened.store->list());
    for (const Entry& entry : entries) {
      if (is_leftover(entry)) gone.push_back(entry.name);
    }
    if (!dry_run) TORPOR_TRY(remove_leftovers(*opened.store));
    TORPOR_ASSIGN(const std::vector<std::string> retired, retire(*opened.store, impl_->options, dry_run));
    gone.insert(gone.end(), retired.begin(), retired.end());
    return gone;
  });
}

Result<std::vector<CheckpointInfo>> CheckpointManager::list() const {
  return catching([&]() -> Result<std::vector<CheckpointInfo>> {
    TORPOR_ASSIGN(const std::unique_ptr<Directory> store, impl_->file_system.open_directory(impl_->directory, false));
    return infos_in(*store, impl_->options.key.get(), Trust::kThisKey);
  });
}

Result<Checkpoint> CheckpointManager::open_latest() const {
  return catching([&]() -> Result<Checkpoint> {
    TORPOR_ASSIGN(const std::unique_ptr<Directory> store, impl_->file_system.open_directory(impl_->directory, false));
    return torpor::open_latest(impl_->file_system, *store, impl_->options.key);
  });
}

Result<Checkpoint> CheckpointManager::open_generation(uint64_t generation) const {
  return catching([&]() -> Result<Checkpoint> {
    TORPOR_ASSIGN(const std::unique_ptr<Directory> store, impl_->file_system.open_directory(impl_->directory, false));
    TORPOR_ASSIGN(std::unique_ptr<Directory> directory, store->open_directory(generation_name(generation)));
    return open_checkpoint_directory(impl_->file_system, std::move(directory), impl_->options.key);
  });
}

}  // namespace torpor
