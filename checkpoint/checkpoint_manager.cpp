// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/checkpoint_manager.h"

#include <algorithm>
#include <cerrno>

#include <fmt/core.h>

#include "base/log.h"
#include "checkpoint/store_contents.h"
#include "checkpoint/store_names.h"

namespace torpor {
namespace {

Result<Metadata> metadata_of(const Directory& store, const std::string& name, std::shared_ptr<const Key> key) {
  TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<Directory> directory, store.open_directory(name));
  TORPOR_ASSIGN_OR_RETURN(const Checkpoint checkpoint, open_checkpoint_directory(std::move(directory), std::move(key)));
  return checkpoint.read_metadata();
}

// Whoever removes the checkpoint at the same time removes the mark with it, or leaves both to the next collect().
Status mark_woken(Directory& checkpoint) {
  if (checkpoint.open_file(kWokenFile)) return checkpoint.sync();  // whoever made it may have failed to
  const Result<std::unique_ptr<File>> mark = checkpoint.create_file(kWokenFile);
  // Without the lock another process may have made it.
  if (!mark && mark.error().native == EEXIST) return checkpoint.sync();
  if (!mark) return mark.error();
  TORPOR_RETURN_IF_ERROR((*mark)->sync());
  return checkpoint.sync();
}

}  // namespace

struct CheckpointManager::Impl {
  FileSystem& file_system;
  std::string directory;
  CheckpointManagerOptions options;

  struct Opened {
    std::unique_ptr<Directory> store;
    std::unique_ptr<File> lock;  // null: for reading only
  };
  Result<Opened> for_reading() const {
    Opened opened;
    TORPOR_ASSIGN_OR_RETURN(opened.store, file_system.open_directory(directory, false));
    return opened;
  }
  Result<Opened> locked(bool create) const {
    Opened opened;
    TORPOR_ASSIGN_OR_RETURN(opened.store, file_system.open_directory(directory, create));
    TORPOR_ASSIGN_OR_RETURN(opened.lock, opened.store->lock(kLockFile));
    return opened;
  }
  // `dry_run`: refused where the removal would be, and nothing is written; a directory may be one that only reads.
  Result<Opened> for_removing(bool dry_run) const {
    if (!dry_run) return locked(false);
    TORPOR_ASSIGN_OR_RETURN(Opened opened, for_reading());
    if (!opened.store->open_file(kLockFile)) return opened;
    Result<std::unique_ptr<File>> lock = opened.store->lock(kLockFile);
    if (lock) {
      opened.lock = *std::move(lock);
    } else if (lock.error().code == Code::kUnavailable) {
      return lock.error();
    }
    return opened;
  }
  Result<std::vector<std::string>> retire(Directory& store, bool dry_run,
                                          const std::optional<Digest>& owner = std::nullopt) const {
    return torpor::retire(store, options.key.get(), options.retention, options.clock->unix_seconds(), dry_run, owner);
  }
};

CheckpointManager::CheckpointManager(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CheckpointManager::~CheckpointManager() = default;

Result<std::unique_ptr<CheckpointManager>> CheckpointManager::open(FileSystem& file_system, std::string directory,
                                                                   CheckpointManagerOptions options) {
  if (directory.empty())
    return Error{.code = Code::kInvalidArgument,
                 .what = "the directory for checkpoints is empty",
                 .next_step = "set checkpoint_dir (or TORPOR_CHECKPOINT_DIR)"};
  TORPOR_RETURN_IF_ERROR(options.validate());
  if (options.clock == nullptr) options.clock = &system_clock();
  return std::unique_ptr<CheckpointManager>(
      new CheckpointManager(std::unique_ptr<Impl>(new Impl{file_system, std::move(directory), std::move(options)})));
}

Result<PendingCheckpoint> CheckpointManager::begin(uint64_t expected_bytes) {
  return try_catch([&]() -> Result<PendingCheckpoint> {
    TORPOR_ASSIGN_OR_RETURN(Impl::Opened locked, impl_->locked(true));
    return PendingCheckpoint::begin(impl_->file_system, std::move(locked.store), std::move(locked.lock), impl_->options,
                                    expected_bytes);
  });
}

RankWriting CheckpointManager::next_writing() const {
  const Result<RankWriting> writing = try_catch([&]() -> Result<RankWriting> {
    TORPOR_ASSIGN_OR_RETURN(const Impl::Opened opened, impl_->for_reading());
    TORPOR_ASSIGN_OR_RETURN(const std::vector<uint64_t> generations, generations_in(*opened.store));
    return writing_of(*opened.store, generations, impl_->options);
  });
  return writing ? *writing : RankWriting{};  // no directory yet
}

Status CheckpointManager::remove(uint64_t generation, bool dry_run) {
  return try_catch([&]() -> Status {
    TORPOR_ASSIGN_OR_RETURN(const Impl::Opened opened, impl_->for_removing(dry_run));
    TORPOR_ASSIGN_OR_RETURN(const std::vector<CheckpointInfo> infos,
                            infos_in(*opened.store, impl_->options.key.get(), Trust::kAnySeal));
    const auto found = std::find_if(infos.begin(), infos.end(), [&](const CheckpointInfo& info) {
      return info.name == generation_name(generation);
    });
    if (found == infos.end())
      return Error{.code = Code::kNotFound,
                   .what = fmt::format("there is no {} in {}", generation_name(generation), impl_->directory),
                   .next_step = "see torpor ls"};
    return dry_run ? check_not_slept_on(*opened.store, generation) : remove_generation(*opened.store, generation);
  });
}

Status CheckpointManager::woken_from(uint64_t generation) {
  return try_catch([&]() -> Status {
    // Another process may hold the lock for long, and a wake is marked only once: the mark is made even without it.
    Result<Impl::Opened> locked = impl_->locked(false);
    std::unique_ptr<Directory> checkpoint;
    const Status marked = try_catch([&]() -> Status {
      Impl::Opened reading;
      if (!locked) {
        TORPOR_ASSIGN_OR_RETURN(reading, impl_->for_reading());
      }
      const Directory& store = locked ? *locked->store : *reading.store;
      TORPOR_ASSIGN_OR_RETURN(checkpoint, store.open_directory(generation_name(generation)));
      return mark_woken(*checkpoint);
    });
    if (!marked) return marked.error().within(fmt::format("{} was not marked as woken", generation_name(generation)));
    const Status retired = try_catch([&]() -> Status {
      if (!locked) return locked.error();
      TORPOR_ASSIGN_OR_RETURN(const OpenedManifest opened, read_manifest(*checkpoint, impl_->options.key.get()));
      TORPOR_RETURN_IF_ERROR(impl_->retire(*locked->store, false, opened.manifest.owner));
      return ok();
    });
    return retired ? ok() : Status(retired.error().within("older checkpoints were not removed"));
  });
}

Result<std::vector<std::string>> CheckpointManager::collect(bool dry_run) {
  return try_catch([&]() -> Result<std::vector<std::string>> {
    TORPOR_ASSIGN_OR_RETURN(const Impl::Opened opened, impl_->for_removing(dry_run));
    TORPOR_ASSIGN_OR_RETURN(std::vector<std::string> gone, leftovers_in(*opened.store));
    if (!dry_run) TORPOR_RETURN_IF_ERROR(remove_leftovers(*opened.store));
    TORPOR_ASSIGN_OR_RETURN(const std::vector<std::string> retired, impl_->retire(*opened.store, dry_run));
    gone.insert(gone.end(), retired.begin(), retired.end());
    return gone;
  });
}

Result<std::vector<CheckpointInfo>> CheckpointManager::list() const {
  return try_catch([&]() -> Result<std::vector<CheckpointInfo>> {
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> store,
                            impl_->file_system.open_directory(impl_->directory, false));
    TORPOR_ASSIGN_OR_RETURN(std::vector<CheckpointInfo> infos,
                            infos_in(*store, impl_->options.key.get(), Trust::kThisKey));
    for (CheckpointInfo& info : infos) {
      if (!info.readable) continue;
      Result<Metadata> metadata = try_catch([&] { return metadata_of(*store, info.name, impl_->options.key); });
      if (metadata) {
        info.metadata = *std::move(metadata);
      } else if (metadata.error().code != Code::kNotFound) {  // otherwise another process has removed it
        log().warn("the metadata of {} cannot be read: {}", info.path, metadata.error());
      }
    }
    return infos;
  });
}

Result<Checkpoint> CheckpointManager::open_latest() const {
  return try_catch([&]() -> Result<Checkpoint> {
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> store,
                            impl_->file_system.open_directory(impl_->directory, false));
    return torpor::open_latest(*store, impl_->options.key);
  });
}

Result<Checkpoint> CheckpointManager::open_generation(uint64_t generation) const {
  return try_catch([&]() -> Result<Checkpoint> {
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> store,
                            impl_->file_system.open_directory(impl_->directory, false));
    TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<Directory> directory, store->open_directory(generation_name(generation)));
    return open_checkpoint_directory(std::move(directory), impl_->options.key);
  });
}

}  // namespace torpor
