#include "checkpoint/checkpoint_manager.h"

#include <algorithm>
#include <charconv>

#include <fmt/format.h>

#include "base/log.h"
#include "base/units.h"
#include "checkpoint/store_names.h"
#include "offload/codec.h"

namespace torpor {

std::string generation_name(uint64_t generation) { return fmt::format("{}{:06}", kGenerationPrefix, generation); }

std::optional<uint64_t> generation_of(std::string_view entry_name) {
  if (!entry_name.starts_with(kGenerationPrefix)) return std::nullopt;
  uint64_t generation = 0;
  const std::string_view digits = entry_name.substr(kGenerationPrefix.size());
  const auto [end, problem] = std::from_chars(digits.data(), digits.data() + digits.size(), generation);
  if (problem != std::errc{} || end != digits.data() + digits.size() || generation_name(generation) != entry_name) return std::nullopt;
  return generation;
}

namespace {

constexpr uint64_t kSpareBytes = 4 * kMiB;  // for directories, the manifest and what a file system needs itself

Result<std::vector<uint64_t>> generations_in(const Directory& store) {
  TORPOR_ASSIGN(const std::vector<Entry> entries, store.list());
  std::vector<uint64_t> generations;
  for (const Entry& entry : entries) {
    if (entry.kind != EntryKind::kDirectory) continue;
    if (const std::optional<uint64_t> generation = generation_of(entry.name)) generations.push_back(*generation);
  }
  std::sort(generations.begin(), generations.end());
  return generations;
}

// Away from its name first, so that a half-removed checkpoint is never seen as one.
Status remove_entry(Directory& store, const std::string& name) {
  std::string doomed = name;
  if (generation_of(name)) {
    doomed = fmt::format("{}{}", kTrashPrefix, name);
    TORPOR_TRY(store.rename_new(name, doomed));
    TORPOR_TRY(store.sync());
  }
  return store.remove_tree(doomed);
}

// What a killed writer left. Precondition: the lock is held.
Status remove_leftovers(Directory& store) {
  TORPOR_ASSIGN(const std::vector<Entry> entries, store.list());
  for (const Entry& entry : entries) {
    if (entry.name.starts_with(kStagingPrefix) || entry.name.starts_with(kTrashPrefix)) TORPOR_TRY(store.remove_tree(entry.name));
  }
  return ok();
}

}  // namespace

struct PendingCheckpoint::Impl {
  std::unique_ptr<Directory> store;
  std::unique_ptr<Directory> staging;
  std::unique_ptr<File> lock;
  std::string staging_name;
  Manifest manifest;
  bool committed = false;

  ~Impl() {
    if (committed || staging == nullptr) return;
    staging.reset();
    if (const Status done = store->remove_tree(staging_name); !done) {
      log().warn("an unfinished checkpoint could not be removed, the next one will: {}", done.error().to_string());
    }
  }
};

PendingCheckpoint::PendingCheckpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PendingCheckpoint::PendingCheckpoint(PendingCheckpoint&&) noexcept = default;
PendingCheckpoint& PendingCheckpoint::operator=(PendingCheckpoint&&) noexcept = default;
PendingCheckpoint::~PendingCheckpoint() = default;

const std::string& PendingCheckpoint::staging_path() const { return impl_->staging->path(); }

Status PendingCheckpoint::write_state(const EngineCheckpoint& checkpoint) {
  TORPOR_ASSIGN(const std::unique_ptr<File> file, impl_->staging->create_file(kStateFile));
  uint64_t offset = 0;
  for (Section& section : encode(checkpoint)) {
    SectionInfo info{.name = section.name, .offset = offset, .bytes = section.bytes.size()};
    if (std::optional<Bytes> packed = compress(std::as_bytes(std::span(section.bytes)))) {
      info.codec = Codec::kZstd;
      section.bytes = std::move(*packed);
    }
    const auto stored = std::as_bytes(std::span(section.bytes));
    info.stored_bytes = stored.size();
    info.digest = digest_of(stored);
    TORPOR_TRY(file->pwrite(stored, offset));
    offset += stored.size();
    impl_->manifest.sections.push_back(std::move(info));
  }
  TORPOR_TRY(file->sync());
  return impl_->staging->sync();
}

void PendingCheckpoint::add_rank(RankChunks chunks) { impl_->manifest.ranks.push_back(std::move(chunks)); }

Result<std::string> PendingCheckpoint::commit() {
  Manifest& manifest = impl_->manifest;
  if (manifest.sections.empty()) return Error{.code = Code::kInternal, .what = "commit() before write_state()"};
  std::sort(manifest.ranks.begin(), manifest.ranks.end(), [](const RankChunks& a, const RankChunks& b) { return a.rank < b.rank; });
  for (const RankChunks& rank : manifest.ranks) {
    TORPOR_ASSIGN(const std::unique_ptr<File> file, impl_->staging->open_file(rank.file));
    TORPOR_ASSIGN(const uint64_t size, file->size());
    if (size != rank.file_bytes) {
      return Error{.code = Code::kIo,
                   .what = fmt::format("{} has {} bytes, rank {} wrote {}", file->name(), size, rank.rank, rank.file_bytes),
                   .next_step = "all ranks must write to the same file system"};
    }
  }
  TORPOR_ASSIGN(const std::unique_ptr<File> file, impl_->staging->create_file(kManifestFile));
  const Bytes bytes = encode_manifest(manifest);
  TORPOR_TRY(file->pwrite(std::as_bytes(std::span(bytes)), 0));
  TORPOR_TRY(file->sync());
  TORPOR_TRY(impl_->staging->sync());
  const std::string name = generation_name(manifest.generation);
  TORPOR_TRY(impl_->store->rename_new(impl_->staging_name, name));
  if (Status synced = impl_->store->sync(); !synced) {
    // Perhaps durable, perhaps not: nobody may ever believe it.
    if (const Status removed = remove_entry(*impl_->store, name); !removed) {
      log().error("an unacknowledged checkpoint is left at {}/{}: {}", impl_->store->path(), name, removed.error().to_string());
    }
    impl_->committed = true;
    return synced.error();
  }
  impl_->committed = true;
  return fmt::format("{}/{}", impl_->store->path(), name);
}

struct CheckpointManager::Impl {
  FileSystem& file_system;
  std::string directory;
  CheckpointManagerOptions options;
};

CheckpointManager::CheckpointManager(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CheckpointManager::~CheckpointManager() = default;

Result<std::unique_ptr<CheckpointManager>> CheckpointManager::open(FileSystem& file_system, std::string directory, CheckpointManagerOptions options) {
  if (options.keep < 1) {
    return Error{.code = Code::kInvalidArgument, .what = fmt::format("keep is {}", options.keep), .next_step = "keep at least 1 checkpoint"};
  }
  if (options.clock == nullptr) options.clock = &system_clock();
  return std::unique_ptr<CheckpointManager>(new CheckpointManager(std::make_unique<Impl>(Impl{file_system, std::move(directory), options})));
}

Result<PendingCheckpoint> CheckpointManager::begin(uint64_t expected_bytes) {
  auto pending = std::make_unique<PendingCheckpoint::Impl>();
  TORPOR_ASSIGN(pending->store, impl_->file_system.open_directory(impl_->directory, true));
  TORPOR_ASSIGN(pending->lock, pending->store->lock(kLockFile));
  TORPOR_TRY(remove_leftovers(*pending->store));
  TORPOR_ASSIGN(const uint64_t free, pending->store->free_bytes());
  if (expected_bytes > free || free - expected_bytes < kSpareBytes) {
    return Error{.code = Code::kResourceExhausted,
                 .what = fmt::format("the checkpoint needs {} bytes, {} has {} free", expected_bytes + kSpareBytes, impl_->directory, free),
                 .next_step = "free disk space or choose another directory"};
  }
  TORPOR_ASSIGN(const std::vector<uint64_t> generations, generations_in(*pending->store));
  pending->manifest.generation = generations.empty() ? 1 : generations.back() + 1;
  pending->manifest.created_unix_seconds = impl_->options.clock->unix_seconds();
  pending->manifest.creator = "torpor " TORPOR_VERSION;
  const std::string staging_name = fmt::format("{}{:06}", kStagingPrefix, pending->manifest.generation);
  TORPOR_ASSIGN(pending->staging, pending->store->create_directory(staging_name));
  pending->staging_name = staging_name;
  return PendingCheckpoint(std::move(pending));
}

Status CheckpointManager::remove(uint64_t generation) {
  TORPOR_ASSIGN(const std::unique_ptr<Directory> store, impl_->file_system.open_directory(impl_->directory, false));
  TORPOR_ASSIGN(const std::unique_ptr<File> lock, store->lock(kLockFile));
  return remove_entry(*store, generation_name(generation));
}

Status CheckpointManager::woken_from(uint64_t generation) {
  TORPOR_ASSIGN(const std::unique_ptr<Directory> store, impl_->file_system.open_directory(impl_->directory, false));
  TORPOR_ASSIGN(const std::unique_ptr<File> lock, store->lock(kLockFile));
  TORPOR_ASSIGN(std::vector<uint64_t> generations, generations_in(*store));
  const size_t kept = std::min(generations.size(), static_cast<size_t>(impl_->options.keep));
  generations.resize(generations.size() - kept);
  for (const uint64_t old : generations) {
    if (old < generation) TORPOR_TRY(remove_entry(*store, generation_name(old)));
  }
  return ok();
}

Result<std::vector<CheckpointInfo>> CheckpointManager::list() const {
  TORPOR_ASSIGN(const std::unique_ptr<Directory> store, impl_->file_system.open_directory(impl_->directory, false));
  TORPOR_ASSIGN(const std::vector<uint64_t> generations, generations_in(*store));
  std::vector<CheckpointInfo> infos;
  for (const uint64_t generation : generations) {
    CheckpointInfo info{.name = generation_name(generation)};
    info.path = fmt::format("{}/{}", store->path(), info.name);
    const Result<Manifest> manifest = [&]() -> Result<Manifest> {
      TORPOR_ASSIGN(const std::unique_ptr<Directory> directory, store->open_directory(info.name));
      return read_manifest(*directory);
    }();
    info.readable = manifest.has_value();
    if (manifest) {
      info.manifest = *manifest;
    } else {
      info.problem = manifest.error();
    }
    infos.push_back(std::move(info));
  }
  return infos;
}

Result<Checkpoint> CheckpointManager::open_latest() const {
  TORPOR_ASSIGN(const std::unique_ptr<Directory> store, impl_->file_system.open_directory(impl_->directory, false));
  TORPOR_ASSIGN(const std::vector<uint64_t> generations, generations_in(*store));
  if (generations.empty()) {
    return Error{.code = Code::kNotFound, .what = fmt::format("there is no checkpoint in {}", impl_->directory), .next_step = "name a checkpoint, or a directory of checkpoints"};
  }
  TORPOR_ASSIGN(std::unique_ptr<Directory> directory, store->open_directory(generation_name(generations.back())));
  return open_checkpoint_directory(std::move(directory));
}

}  // namespace torpor
