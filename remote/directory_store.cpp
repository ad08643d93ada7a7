// SPDX-License-Identifier: Apache-2.0
#include "remote/directory_store.h"

#include <algorithm>
#include <atomic>
#include <functional>

#include <fmt/core.h>

#include "base/digest.h"
#include "base/seal.h"
#include "remote/object_keys.h"

namespace torpor::remote {
namespace {

constexpr std::string_view kUnfinished = "unfinished-";

// Return whether put_new() can have made a file of this name, and was ended before it had its key.
bool is_unfinished(std::string_view name) {
  if (!name.starts_with(kUnfinished)) return false;
  const std::string_view rest = name.substr(kUnfinished.size());
  constexpr size_t kId = 2 * sizeof(SealId);
  return rest.size() > kId + 1 && is_hex(rest.substr(0, kId), sizeof(SealId)) && rest[kId] == '-' &&
         rest.find_first_not_of("0123456789", kId + 1) == std::string_view::npos;
}

struct Place {
  std::unique_ptr<Directory> directory;
  std::string name;
};

class DirectoryStore final : public ObjectStore {
 public:
  using Visit = std::function<bool(std::string_view name)>;
  DirectoryStore(FileSystem& file_system, std::string path)
      : file_system_(file_system), path_(std::move(path)), url_("file://" + path_) {}

  const std::string& url() const override { return url_; }

  Status check_exists() override {
    const auto directory = file_system_.open_directory(path_, false);
    if (directory) return ok();
    if (directory.error().code != Code::kNotFound) return directory.error();
    return Error{.code = Code::kNotFound,
                 .what = fmt::format("there is no directory {}", path_),
                 .next_step = "check how it is written, and that it is mounted"};
  }

  Result<bool> put_new(std::string_view key, std::span<const std::byte> bytes) override {
    TORPOR_ASSIGN_OR_RETURN(Place place, open(key, true));
    if (place.directory->open_file(place.name)) return false;
    const std::string unfinished = fmt::format("{}{}-{}", kUnfinished, id_, next_.fetch_add(1));
    const Status written = [&]() -> Status {
      TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, place.directory->create_file(unfinished));
      TORPOR_RETURN_IF_ERROR(file->pwrite(bytes, 0));
      return file->sync();
    }();
    if (written) {
      const Status named = place.directory->rename_new(unfinished, place.name);
      if (named) {
        TORPOR_RETURN_IF_ERROR(place.directory->sync());
        return true;
      }
      (void)place.directory->remove_file(unfinished);
      if (place.directory->open_file(place.name)) return false;  // another one was faster
      return named.error();
    }
    (void)place.directory->remove_file(unfinished);
    return written.error();
  }

  Result<uint64_t> get(std::string_view key, std::span<std::byte> room) override {
    TORPOR_ASSIGN_OR_RETURN(const Place place, open(key, false));
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, place.directory->open_file(place.name));
    TORPOR_ASSIGN_OR_RETURN(const uint64_t bytes, file->size());
    if (bytes > room.size())
      return Error{.code = Code::kCorruption,
                   .what = fmt::format("{} of {} is larger than {} bytes", key, url_, room.size()),
                   .next_step = "it is not what torpor stored there"};
    TORPOR_RETURN_IF_ERROR(file->pread(room.first(bytes), 0));
    return bytes;
  }

  Status get_range(std::string_view key, uint64_t offset, std::span<std::byte> room) override {
    TORPOR_ASSIGN_OR_RETURN(const Place place, open(key, false));
    TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, place.directory->open_file(place.name));
    TORPOR_ASSIGN_OR_RETURN(const uint64_t bytes, file->size());
    if (offset > bytes || room.size() > bytes - offset) return ends_too_early(*this, key, offset, room.size());
    return file->pread(room, offset);
  }

  Result<std::optional<uint64_t>> size(std::string_view key) override {
    const auto found = [&]() -> Result<uint64_t> {
      TORPOR_ASSIGN_OR_RETURN(const Place place, open(key, false));
      TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<File> file, place.directory->open_file(place.name));
      return file->size();
    }();
    if (found) return std::optional<uint64_t>(*found);
    if (found.error().code == Code::kNotFound) return std::optional<uint64_t>();
    return found.error();
  }

  Status remove(std::string_view key) override {
    const Result<Place> place = open(key, false);
    if (!place) return place.error().code == Code::kNotFound ? ok() : Status(place.error());
    const Status removed = place->directory->remove_file(place->name);
    if (!removed && removed.error().code != Code::kNotFound) return removed;
    return place->directory->sync();
  }

  Status each_key(std::string_view prefix, const std::function<bool(std::string_view key)>& visit) override {
    const size_t slash = prefix.rfind('/');
    const std::string folder(prefix.substr(0, slash == std::string_view::npos ? 0 : slash));
    Result<Place> place = open(folder.empty() ? "x" : folder + "/x", false);
    if (!place && place.error().code == Code::kNotFound) return ok();
    if (!place) return place.error();
    const std::string before = folder.empty() ? "" : folder + "/";
    const Result<bool> all = each_below(*place->directory, before,
                                        [&](std::string_view key) { return !key.starts_with(prefix) || visit(key); });
    return all ? ok() : Status(all.error());
  }

  Status remove_unfinished(std::string_view folder, const Visit& goes) override {
    Result<Place> place = open(fmt::format("{}/x", folder), false);
    if (!place && place.error().code == Code::kNotFound) return ok();
    if (!place) return place.error();
    return remove_unfinished_below(*place->directory, goes);
  }

 private:
  static Status remove_unfinished_below(Directory& directory, const Visit& goes) {
    TORPOR_ASSIGN_OR_RETURN(const std::vector<Entry> entries, directory.list());
    for (const Entry& entry : entries) {
      if (entry.kind == EntryKind::kDirectory) {
        TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> below, directory.open_directory(entry.name));
        TORPOR_RETURN_IF_ERROR(remove_unfinished_below(*below, goes));
      } else if (entry.kind == EntryKind::kFile && is_unfinished(entry.name) && goes(entry.name)) {
        const Status removed = directory.remove_file(entry.name);
        if (!removed && removed.error().code != Code::kNotFound) return removed;  // another one was faster
      }
    }
    return ok();
  }

  // Visit all keys below the directory. Return false if `visit` did.
  Result<bool> each_below(const Directory& directory, const std::string& before,
                          const std::function<bool(std::string_view key)>& visit) const {
    TORPOR_ASSIGN_OR_RETURN(const std::vector<Entry> entries, directory.list());
    for (const Entry& entry : entries) {
      if (entry.kind == EntryKind::kDirectory) {
        TORPOR_ASSIGN_OR_RETURN(const std::unique_ptr<Directory> below, directory.open_directory(entry.name));
        TORPOR_ASSIGN_OR_RETURN(const bool goes_on, each_below(*below, before + entry.name + "/", visit));
        if (!goes_on) return false;
      } else if (entry.kind == EntryKind::kFile && !is_unfinished(entry.name) && is_key(before + entry.name) &&
                 !visit(before + entry.name)) {
        return false;
      }
    }
    return true;
  }

  // Return the directory of the key's file. `create`: create it if needed.
  Result<Place> open(std::string_view key, bool create) const {
    if (!is_key(key))
      return Error{.code = Code::kInternal, .what = fmt::format("{} is no key", key), .next_step = "report this"};
    TORPOR_ASSIGN_OR_RETURN(std::unique_ptr<Directory> directory, file_system_.open_directory(path_, create));
    size_t begin = 0;
    for (size_t slash = key.find('/'); slash != std::string_view::npos; slash = key.find('/', begin)) {
      const std::string_view word = key.substr(begin, slash - begin);
      Result<std::unique_ptr<Directory>> below = directory->open_directory(word);
      if (!below && create && below.error().code == Code::kNotFound) {
        below = directory->create_directory(word);
        if (!below) below = directory->open_directory(word);  // another one was faster
        TORPOR_RETURN_IF_ERROR(directory->sync());
      }
      if (!below) return below.error();
      directory = std::move(*below);
      begin = slash + 1;
    }
    return Place{std::move(directory), std::string(key.substr(begin))};
  }

  FileSystem& file_system_;
  const std::string path_;
  const std::string url_;
  const std::string id_ = hex(random_seal_id());  // names of unfinished files differ between machines
  std::atomic<uint64_t> next_ = 1;
};

}  // namespace

Result<std::unique_ptr<ObjectStore>> open_directory_store(FileSystem& file_system, const std::string& path) {
  return std::unique_ptr<ObjectStore>(std::make_unique<DirectoryStore>(file_system, path));
}

}  // namespace torpor::remote
