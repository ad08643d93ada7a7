// SPDX-License-Identifier: Apache-2.0
#include "base/shared_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string_view>

#include <fmt/core.h>

#include "base/linux_file.h"

namespace torpor {
namespace {

constexpr std::string_view kPrefix = "torpor-shared-";
constexpr int kTries = 100;

// Call `use` with each name in an open directory, until it returns false. Return whether it always returned true.
template <class Use>
bool each_name(int directory, const Use& use) {
  const int own = ::openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* const listing = own < 0 ? nullptr : ::fdopendir(own);
  if (listing == nullptr) return own >= 0 && ::close(own), false;
  bool all = true;
  while (const dirent* entry = all ? ::readdir(listing) : nullptr) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") all = use(entry->d_name);
  }
  (void)::closedir(listing);
  return all;
}

bool is_locked(int directory, const char* name) {
  const Descriptor file(::openat(directory, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return file.get() < 0 || ::fcntl(file.get(), F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

void remove_all(const std::string& path, int folder) noexcept {
  (void)each_name(folder, [&](const char* name) { return ::unlinkat(folder, name, 0), true; });
  (void)::rmdir(path.c_str());
}

void remove_if_left(int place, const std::string& path, const char* name) {
  const Descriptor folder(::openat(place, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat status {};
  if (folder.get() < 0 || ::fstat(folder.get(), &status) != 0 || !is_own(status)) return;
  if (::flock(folder.get(), LOCK_EX | LOCK_NB) != 0) return;
  if (each_name(folder.get(), [&](const char* file) { return !is_locked(folder.get(), file); }))
    remove_all(path, folder.get());
}

}  // namespace

std::string SharedFolder::usual_place() { return ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp"; }

Result<std::unique_ptr<SharedFolder>> SharedFolder::make(const std::string& place) {
  remove_left(place);
  return try_catch([&]() -> Result<std::unique_ptr<SharedFolder>> {
    for (int i = 0; i < kTries; ++i) {
      std::string path = fmt::format("{}/{}XXXXXX", place, kPrefix);
      if (::mkdtemp(path.data()) == nullptr) return system_error(errno, fmt::format("making {}", path));
      Result<Descriptor> folder = guarded(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), path);
      struct stat status {};
      // A process that runs remove_left() may have been faster.
      if (folder && ::flock(folder->get(), LOCK_EX | LOCK_NB) == 0 && ::fstat(folder->get(), &status) == 0 &&
          status.st_nlink > 0) {
        std::unique_ptr<SharedFolder> made(new SharedFolder(std::move(path), folder->get()));
        (void)folder->release();
        return made;
      }
      (void)::rmdir(path.c_str());
    }
    return Error{.code = Code::kUnavailable,
                 .what = fmt::format("no folder in {} stayed", place),
                 .next_step = "see who removes them"};
  });
}

void SharedFolder::remove_left(const std::string& place) noexcept {
  (void)try_catch([&]() -> Status {
    const Descriptor directory(::open(place.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (directory.get() < 0) return ok();
    (void)each_name(directory.get(), [&](const char* name) {
      if (std::string_view(name).starts_with(kPrefix))
        remove_if_left(directory.get(), fmt::format("{}/{}", place, name), name);
      return true;
    });
    return ok();
  });
}

void SharedFolder::remove() noexcept { remove_all(path_, folder_); }

SharedFolder::~SharedFolder() {
  remove();
  (void)::close(folder_);
}

}  // namespace torpor
