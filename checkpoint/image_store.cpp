// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/image_store.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include <fmt/core.h>
#include <boost/filesystem.hpp>

#include "base/log.h"
#include "checkpoint/image_section.h"
#include "checkpoint/manifest_codec.h"
#include "checkpoint/store_contents.h"
#include "checkpoint/store_names.h"

namespace torpor {
namespace {

constexpr std::string_view kEndedPrefix = "ended-";  // a file in g-000001: the request at this position has ended
constexpr uint64_t kGeneration = 1;                  // an image has no other
constexpr size_t kMostNameBytes = 128;
constexpr int kTries = 3;  // another process may remove a directory as a leftover before it is locked

bool is_name(std::string_view name) {
  const auto fits = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
           c == '.';
  };
  return !name.empty() && name.size() <= kMostNameBytes && name.front() != '.' &&
         std::all_of(name.begin(), name.end(), fits);
}

Error gone(const std::string& path) {
  return {.code = Code::kNotFound,
          .what = fmt::format("there is no image at {}", path),
          .next_step = "another engine may have taken it; see torpor sessions"};
}

Error or_gone(Error error, const std::string& path) { return error.code == Code::kNotFound ? gone(path) : error; }

// Return whether the directory has a committed image.
Result<bool> has_image(const Directory& store) {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<uint64_t> generations, generations_in(store));
  return !generations.empty();
}

// Return whether the directory has only what is there before an image is committed and after it was taken.
Result<bool> has_only_leftovers(const Directory& store) {
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Entry> entries, store.list());
  return std::all_of(entries.begin(), entries.end(), [](const Entry& entry) {
    return (entry.kind == EntryKind::kFile && entry.name == kLockFile) || is_leftover(entry);
  });
}

std::optional<int32_t> ended_position(std::string_view name) {
  if (!name.starts_with(kEndedPrefix)) return std::nullopt;
  const std::string_view digits = name.substr(kEndedPrefix.size());
  int32_t position = 0;
  const auto [end, problem] = std::from_chars(digits.data(), digits.data() + digits.size(), position);
  const bool whole = problem == std::errc{} && end == digits.data() + digits.size();
  return whole ? std::optional(position) : std::nullopt;
}

// Return whether the image was written as `id`. A damaged image is identified by its path alone. kIo and other errors
// of the file system: it may be another image, so the caller leaves it alone.
Result<bool> is_same(const Directory& image, const SealId& id, const Key* key) {
  const Result<OpenedManifest> opened = read_manifest(image, key);
  if (opened) return opened->manifest.id == id;
  constexpr std::array kDamage = {Code::kCorruption, Code::kIncompatible, Code::kUnauthenticated, Code::kNotFound};
  if (std::find(kDamage.begin(), kDamage.end(), opened.error().code) == kDamage.end()) return opened.error();
  return true;
}

// A locked directory of an image.
struct Locked {
  std::unique_ptr<Directory> images;  // the directory that contains it
  std::string name;
  std::string path;
  std::unique_ptr<Directory> store;
  std::unique_ptr<File> lock;

  // See HeldImage::meaning_of().
  Error meaning_of(Error error) const {
    const Result<bool> still_there = has_image(*store);
    const bool taken = still_there ? !*still_there : still_there.error().code == Code::kNotFound;
    if (taken) return gone(path);
    if (error.code == Code::kNotFound) error.code = Code::kCorruption;
    return error;
  }

  // Hide the image that was written as `id`, and remove its files. The rename need not be durable: if the machine ends,
  // so does the engine that has taken the image. kNotFound: it is gone, or another image has its place: where locks do
  // not work between hosts, one engine takes an image that another one holds, and a third one reuses its name.
  // `ended`: what the taker knows of ended requests; kUnavailable: more of them have ended. Null: that is of no
  // interest.
  Status take(const SealId& id, const Key* key, const std::set<int32_t>* ended) {
    const std::string there = generation_name(kGeneration);
    const std::string hidden = fmt::format("{}{}", kTrashPrefix, there);
    Result<std::unique_ptr<Directory>> image = store->open_directory(there);
    if (!image) return or_gone(std::move(image).error(), path);
    TORPOR_ASSIGN_OR_RETURN(const bool same, is_same(**image, id, key));
    if (!same) return gone(path);
    const auto no_more_ended = [&]() -> Status {
      if (ended == nullptr) return ok();
      TORPOR_ASSIGN_OR_RETURN(const std::set<int32_t> now, ended_in(**image));
      if (now == *ended) return ok();
      return Error{.code = Code::kUnavailable,
                   .what = fmt::format("requests of the image {} have ended while it was read", path),
                   .next_step = "resume it again: those will be left out"};
    };
    TORPOR_RETURN_IF_ERROR(no_more_ended());
    if (Status renamed = store->rename_new(there, hidden); !renamed) return or_gone(std::move(renamed).error(), path);
    // From here on nobody can note one more.
    if (const Status unchanged = no_more_ended(); !unchanged) {
      if (store->rename_new(hidden, there) || store->rename_new(hidden, there)) return unchanged.error();
      Error error = unchanged.error();
      error.code = Code::kIo;
      error.what += fmt::format("; it lies in {}/{} now", path, hidden);
      error.next_step = fmt::format("rename that to {} before torpor gc removes it, then resume it again", there);
      return error;
    }
    const Status removed = try_catch([&]() -> Status {
      TORPOR_RETURN_IF_ERROR(store->sync());
      return images->remove_tree(name);
    });
    if (removed) return ok();
    return try_catch([&]() -> Status {
      log().warn("the files of the image {} could not be removed, torpor gc will: {}", path, removed.error());
      return ok();
    });
  }
};

// `path`: ends with the image's directory.
Result<Locked> lock_image(FileSystem& file_system, const std::string& path) {
  const boost::filesystem::path place = plain_path(path);
  Locked found{.images = {}, .name = place.filename().string(), .path = path, .store = {}, .lock = {}};
  const auto open = [&]() -> Status {
    TORPOR_ASSIGN_OR_RETURN(found.images, file_system.open_directory(place.parent_path().string(), false));
    TORPOR_ASSIGN_OR_RETURN(found.store, found.images->open_directory(found.name));
    TORPOR_ASSIGN_OR_RETURN(const bool there, has_image(*found.store));  // without an image make no lock file
    if (!there) return gone(path);
    TORPOR_ASSIGN_OR_RETURN(found.lock, found.store->lock(kLockFile));
    TORPOR_ASSIGN_OR_RETURN(const bool still_there, has_image(*found.store));
    return still_there ? ok() : Status(gone(path));
  };
  Status opened = open();
  if (opened) return found;
  if (opened.error().code == Code::kUnavailable) {
    return Error{.code = Code::kUnavailable,
                 .what = fmt::format("another engine reads the image {}", path),
                 .next_step = "wait until it has taken the image or has given it up"};
  }
  return or_gone(std::move(opened).error(), path);
}

}  // namespace

bool is_ended_note(std::string_view name) { return ended_position(name).has_value(); }

Result<std::set<int32_t>> ended_in(const Directory& image) {
  std::set<int32_t> ended;
  TORPOR_ASSIGN_OR_RETURN(const std::vector<Entry> entries, image.list());
  for (const Entry& entry : entries) {
    if (const std::optional<int32_t> position = ended_position(entry.name)) ended.insert(*position);
  }
  return ended;
}

// --- HeldImage ---

struct HeldImage::Impl {
  Locked locked;
  std::set<int32_t> ended;
  std::shared_ptr<const Key> key;
  Checkpoint checkpoint;
};

HeldImage::HeldImage(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HeldImage::HeldImage(HeldImage&&) noexcept = default;
HeldImage& HeldImage::operator=(HeldImage&&) noexcept = default;
HeldImage::~HeldImage() = default;

Result<HeldImage> HeldImage::hold(FileSystem& file_system, const std::string& path, std::shared_ptr<const Key> key) {
  return try_catch([&]() -> Result<HeldImage> {
    TORPOR_ASSIGN_OR_RETURN(Locked locked, lock_image(file_system, path));
    std::set<int32_t> ended;
    Result<Checkpoint> checkpoint = [&]() -> Result<Checkpoint> {
      TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<Directory> image,
                              locked.store->open_directory(generation_name(kGeneration)));
      TORPOR_ASSIGN_OR_RETURN(ended, ended_in(*image));
      return open_checkpoint_directory(std::move(image), key);
    }();
    if (!checkpoint) return locked.meaning_of(std::move(checkpoint).error());
    if (!is_image(checkpoint->manifest())) {
      return Error{.code = Code::kIncompatible,
                   .what = fmt::format("{} is a checkpoint of a whole engine", path),
                   .next_step = "wake it: wake_up(from_checkpoint=…)"};
    }
    return HeldImage(std::unique_ptr<Impl>(new Impl{.locked = std::move(locked),
                                                    .ended = std::move(ended),
                                                    .key = std::move(key),
                                                    .checkpoint = std::move(*checkpoint)}));
  });
}

const std::string& HeldImage::name() const { return impl_->locked.name; }
const Checkpoint& HeldImage::checkpoint() const { return impl_->checkpoint; }
const std::set<int32_t>& HeldImage::ended() const { return impl_->ended; }

Error HeldImage::meaning_of(Error error) const { return impl_->locked.meaning_of(std::move(error)); }

Status HeldImage::take() {
  return try_catch(
      [&] { return impl_->locked.take(impl_->checkpoint.manifest().id, impl_->key.get(), &impl_->ended); });
}

// --- ImageStore ---

ImageStore::ImageStore(FileSystem& file_system, std::string directory, CheckpointManagerOptions options)
    : file_system_(file_system), directory_(std::move(directory)), options_([&] {
        options.incremental = false;  // each image is whole by itself and removed by itself
        return std::move(options);
      }()) {}

std::string ImageStore::path_of(std::string_view name) const {
  return fmt::format("{}/{}/{}", directory_, kImagesDirectory, name);
}

Result<std::unique_ptr<Directory>> ImageStore::images(bool create) const {
  return file_system_.open_directory(fmt::format("{}/{}", directory_, kImagesDirectory), create);
}

Status ImageStore::check_there() const {
  const Result<std::unique_ptr<Directory>> all = images(false);
  if (all) return ok();
  return Error{.code = Code::kIo,
               .what = fmt::format("{}/{} cannot be opened: {}", directory_, kImagesDirectory, all.error().what),
               .next_step = "see whether its file system is mounted",
               .origin = Origin::kSystem};
}

Status ImageStore::check_name(std::string_view name) {
  if (is_name(name)) return ok();
  return Error{.code = Code::kInvalidArgument,
               .what = fmt::format("the id \"{}\" of an image on disk", name),
               .next_step = "use at most 128 letters, digits, \"-\", \"_\" and \".\", and no \".\" at the beginning"};
}

Result<PendingCheckpoint> ImageStore::begin(const std::string& name, uint64_t expected_bytes) {
  TORPOR_RETURN_IF_ERROR(check_name(name));
  if (directory_.empty()) {
    return Error{.code = Code::kInvalidArgument,
                 .what = "there is no directory for images",
                 .next_step = "set checkpoint_dir (or TORPOR_CHECKPOINT_DIR)"};
  }
  return try_catch([&]() -> Result<PendingCheckpoint> {
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointManager> manager,
                            CheckpointManager::open(file_system_, path_of(name), options_));
    Result<PendingCheckpoint> pending = manager->begin(expected_bytes);
    const auto may_be_lost = [&] {
      return !pending && (pending.error().code == Code::kNotFound || pending.error().code == Code::kUnavailable);
    };
    for (int tries = 1; tries < kTries && may_be_lost(); ++tries) pending = manager->begin(expected_bytes);
    if (pending && pending->generation() != kGeneration) {
      return Error{.code = Code::kFailedPrecondition,
                   .what = fmt::format("there is an image at {} already", path_of(name)),
                   .next_step = "give each image an id of its own"};
    }
    return pending;
  });
}

void ImageStore::discard(const std::string& name) noexcept {
  const Status discarded = try_catch([&]() -> Status {
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> all, images(false));
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> store, all->open_directory(name));
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> lock, store->lock(kLockFile));
    TORPOR_ASSIGN_OR_RETURN(const bool there, has_image(*store));
    return there ? ok() : all->remove_tree(name);
  });
  if (discarded || discarded.error().code == Code::kNotFound) return;
  (void)try_catch([&]() -> Status {
    log().warn("what is left of the image {} could not be removed: {}", name, discarded.error());
    return ok();
  });
}

Result<HeldImage> ImageStore::hold(const std::string& path) const {
  return HeldImage::hold(file_system_, path, options_.key);
}

Status ImageStore::remove(const std::string& name, const SealId& id) {
  return try_catch([&]() -> Status {
    TORPOR_ASSIGN_OR_RETURN(Locked locked, lock_image(file_system_, path_of(name)));
    return locked.take(id, options_.key.get(), nullptr);
  });
}

Status ImageStore::note_ended(const std::string& name, const SealId& id, int32_t position) {
  return try_catch([&]() -> Status {
    const Status noted = [&]() -> Status {
      TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> all, images(false));
      TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> store, all->open_directory(name));
      TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> image,
                              store->open_directory(generation_name(kGeneration)));
      TORPOR_ASSIGN_OR_RETURN(const bool same, is_same(*image, id, options_.key.get()));
      if (!same) return gone(path_of(name));
      const std::string mark = fmt::format("{}{:06}", kEndedPrefix, position);
      if (image->open_file(mark)) return image->sync();  // whoever made it may have failed to
      TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, image->create_file(mark));
      TORPOR_RETURN_IF_ERROR(file->sync());
      return image->sync();
    }();
    return noted ? noted : Status(or_gone(noted.error(), path_of(name)));
  });
}

Result<std::vector<ImageInfo>> ImageStore::list() const {
  return try_catch([&]() -> Result<std::vector<ImageInfo>> {
    std::vector<ImageInfo> infos;
    const Result<std::unique_ptr<Directory>> all = images(false);
    if (!all && all.error().code == Code::kNotFound) return infos;
    if (!all) return all.error();
    TORPOR_ASSIGN_OR_RETURN(const std::vector<Entry> entries, (*all)->list());
    for (const Entry& entry : entries) {
      if (entry.kind != EntryKind::kDirectory) continue;
      ImageInfo info{.name = entry.name, .path = path_of(entry.name)};
      const Status read = [&]() -> Status {
        TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> store, (*all)->open_directory(entry.name));
        TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> image,
                                store->open_directory(generation_name(kGeneration)));
        TORPOR_ASSIGN_OR_RETURN(info.ended, ended_in(*image));
        const Result<OpenedManifest> opened = read_manifest(*image, options_.key.get());
        info.readable = opened.has_value();
        if (!opened) {
          info.problem = opened.error();
          return ok();
        }
        info.created_unix_seconds = opened->manifest.created_unix_seconds;
        info.bytes = opened->manifest.total_bytes();
        return ok();
      }();
      if (!read && read.error().code == Code::kNotFound) continue;  // not committed yet, or taken
      if (!read) return read.error();
      infos.push_back(std::move(info));
    }
    return infos;
  });
}

Result<std::vector<std::string>> ImageStore::remove_leftovers(bool dry_run) {
  return try_catch([&]() -> Result<std::vector<std::string>> {
    std::vector<std::string> gone;
    const Result<std::unique_ptr<Directory>> all = images(false);
    if (!all && all.error().code == Code::kNotFound) return gone;
    if (!all) return all.error();
    TORPOR_ASSIGN_OR_RETURN(const std::vector<Entry> entries, (*all)->list());
    for (const Entry& entry : entries) {
      if (entry.kind != EntryKind::kDirectory || !is_name(entry.name)) continue;
      const Result<bool> is_gone = [&]() -> Result<bool> {
        TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> store, (*all)->open_directory(entry.name));
        TORPOR_ASSIGN_OR_RETURN(const bool left, has_only_leftovers(*store));
        if (!left || dry_run) return left;
        TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> lock, store->lock(kLockFile));
        TORPOR_ASSIGN_OR_RETURN(const bool still, has_only_leftovers(*store));  // an image may be there since
        if (!still) return false;
        TORPOR_RETURN_IF_ERROR((*all)->remove_tree(entry.name));
        return true;
      }();
      if (is_gone) {
        if (*is_gone) gone.push_back(entry.name);
      } else if (is_gone.error().code != Code::kUnavailable && is_gone.error().code != Code::kNotFound) {
        return is_gone.error();
      }
    }
    return gone;
  });
}

}  // namespace torpor
