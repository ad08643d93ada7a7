// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>

#include <dirent.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

#include <fmt/core.h>
#include <boost/filesystem.hpp>

#include "base/file_system.h"
#include "base/linux_file.h"
#include "base/uring_queue.h"

namespace torpor {
namespace {

constexpr mode_t kFileMode = 0600;
constexpr mode_t kDirectoryMode = 0700;
constexpr unsigned kUringDepth = 64;  // operations at once; more gain nothing on one NVMe device

Status check_component(std::string_view name) {
  if (name.empty() || name == "." || name == ".." || name.find('/') != std::string_view::npos ||
      name.find('\0') != std::string_view::npos) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("\"{}\" is not a single path component", name),
                 .next_step = "use a name without '/'"};
  }
  return ok();
}

// A path component with its terminating zero, in its own storage. It allocates nothing, so no call fails half-way for
// want of memory.
class Terminated {
 public:
  explicit Terminated(std::string_view component) {
    if (component.size() < sizeof text_) component.copy(text_, component.size());
    fits_ = component.size() < sizeof text_;
  }
  const char* text() const { return text_; }
  bool fits() const { return fits_; }

 private:
  char text_[NAME_MAX + 1] = {};
  bool fits_ = false;
};

// Return whether this process is in a group. Members of the group may do what this user may: kubelet gives each file of
// a volume to the group that a pod names as fsGroup.
bool is_own_group(gid_t group) {
  if (group == ::getegid()) return true;
  std::vector<gid_t> groups(static_cast<size_t>(std::max(::getgroups(0, nullptr), 0)));
  const int known = ::getgroups(static_cast<int>(groups.size()), groups.data());
  groups.resize(static_cast<size_t>(std::max(known, 0)));
  return std::find(groups.begin(), groups.end(), group) != groups.end();
}

// Return whether a file has an access control list. If it has, the group bits of its mode are only the upper bound of
// what the entries of the list allow.
bool has_access_list(int fd) { return ::fgetxattr(fd, "system.posix_acl_access", nullptr, 0) > 0; }

// Refuse a file or directory that others could have made or could exchange.
Status check_owned(int fd, const struct stat& info, const std::string& full) {
  if (info.st_uid != ::geteuid() && info.st_uid != 0) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("{} belongs to user {}, this is user {}", full, info.st_uid, ::geteuid()),
                 .next_step = "run as its owner, or change its owner if you trust what is in it"};
  }
  if ((info.st_mode & S_IWOTH) != 0) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("others may write to {}", full),
                 .next_step = "chmod go-w it, if you trust what is in it"};
  }
  if ((info.st_mode & S_IWGRP) == 0 || (is_own_group(info.st_gid) && !has_access_list(fd))) return ok();
  return Error{.code = Code::kFailedPrecondition,
               .what = has_access_list(fd) ? fmt::format("others may write to {}: it has an access control list", full)
                                           : fmt::format("others may write to {}: this process is not in its group {}",
                                                         full, info.st_gid),
               .next_step = "chmod go-w it, if you trust what is in it"};
}

Status check_owned(int fd, const std::string& full) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return system_error(errno, fmt::format("cannot ask what {} is", full));
  return check_owned(fd, info, full);
}

// Refuse a directory if others could exchange it: its parent's owner can, and everybody who may rename the parent's
// entries. With the sticky bit only the owner of the entry may rename it.
Status check_parent(int fd, const std::string& full) {
  struct stat info {};
  if (::fstatat(fd, "..", &info, 0) != 0)
    return system_error(errno, fmt::format("cannot ask what the parent of {} is", full));
  if (info.st_uid != ::geteuid() && info.st_uid != 0) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("the directory that holds {} belongs to user {}, this is user {}", full,
                                     info.st_uid, ::geteuid()),
                 .next_step = "use a directory below one of your own"};
  }
  if ((info.st_mode & S_IWOTH) == 0 || (info.st_mode & S_ISVTX) != 0) return ok();
  return Error{.code = Code::kFailedPrecondition,
               .what = fmt::format("everybody may write to the directory that holds {}", full),
               .next_step = "use a directory below one that only you may write to"};
}

// rename_new() on a file system that knows no flags of a rename, as NFS and some of FUSE. Return 0 or an errno.
//
// A file gets its new name by a link, which fails if the name is in use. A directory is renamed: if another one with
// files in it has got the name meanwhile, that fails. An empty one would be replaced; torpor makes none of such names.
int rename_new_without_flags(int directory, const char* from, const char* to) {
  struct stat info {};
  if (::fstatat(directory, from, &info, AT_SYMLINK_NOFOLLOW) != 0) return errno;
  if (!S_ISDIR(info.st_mode)) {
    if (::linkat(directory, from, directory, to, 0) != 0) return errno;
    return ::unlinkat(directory, from, 0) == 0 ? 0 : errno;
  }
  if (::fstatat(directory, to, &info, AT_SYMLINK_NOFOLLOW) == 0) return EEXIST;
  if (errno != ENOENT) return errno;
  return ::renameat(directory, from, directory, to) == 0 ? 0 : errno;
}

class LinuxDirectory final : public Directory {
 public:
  LinuxDirectory(Descriptor fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  const std::string& path() const override { return path_; }

  Result<std::unique_ptr<File>> create_file(std::string_view name, FileIo wish) override {
    return open_as_file(name, O_RDWR | O_CREAT | O_EXCL, wish, "create");
  }

  Result<std::unique_ptr<File>> open_file(std::string_view name, FileIo wish) const override {
    return open_as_file(name, O_RDONLY | O_NONBLOCK, wish, "open");
  }

  Result<std::unique_ptr<File>> open_slots(std::string_view name, FileIo wish) override {
    return open_as_file(name, O_RDWR | O_CREAT, wish, "open");
  }

  Result<std::unique_ptr<Directory>> create_directory(std::string_view name) override {
    TORPOR_RETURN_IF_ERROR(check_component(name));
    if (::mkdirat(fd_.get(), std::string(name).c_str(), kDirectoryMode) != 0) {
      const int problem = errno;
      return system_error(problem, fmt::format("cannot make the directory {}", join(name)),
                          problem == EEXIST ? "move what is there away" : "check the directory's permissions");
    }
    if (::fchmodat(fd_.get(), std::string(name).c_str(), kDirectoryMode, 0) != 0) {  // a umask may have removed bits
      return system_error(errno, fmt::format("cannot set the permissions of {}", join(name)));
    }
    return open_directory(name);
  }

  Result<std::unique_ptr<Directory>> open_directory(std::string_view name) const override {
    TORPOR_RETURN_IF_ERROR(check_component(name));
    TORPOR_ASSIGN_OR_RETURN(Descriptor fd, open_beneath(fd_.get(), std::string(name), O_RDONLY | O_DIRECTORY, 0,
                                                        fmt::format("cannot open the directory {}", join(name))));
    TORPOR_RETURN_IF_ERROR(check_owned(fd.get(), join(name)));
    return std::unique_ptr<Directory>(std::make_unique<LinuxDirectory>(std::move(fd), join(name)));
  }

  Result<std::vector<Entry>> list() const override {
    TORPOR_ASSIGN_OR_RETURN(
        Descriptor fd, open_beneath(fd_.get(), ".", O_RDONLY | O_DIRECTORY, 0, fmt::format("cannot list {}", path_)));
    return list_descriptor(std::move(fd), path_);
  }

  Status rename_new(std::string_view from, std::string_view to) override {
    TORPOR_RETURN_IF_ERROR(check_component(from));
    TORPOR_RETURN_IF_ERROR(check_component(to));
    const Terminated old_name(from);
    const Terminated new_name(to);
    int failed = ENAMETOOLONG;
    if (old_name.fits() && new_name.fits()) {
      const int done = ::renameat2(fd_.get(), old_name.text(), fd_.get(), new_name.text(), RENAME_NOREPLACE);
      failed = done == 0 ? 0 : errno;
      if (failed == EINVAL || failed == ENOSYS || failed == EOPNOTSUPP)
        failed = rename_new_without_flags(fd_.get(), old_name.text(), new_name.text());
    }
    return failed == 0 ? ok() : system_error(failed, fmt::format("cannot rename {} to {}", join(from), to));
  }

  Status link_new(std::string_view name, Directory& into, std::string_view to) override {
    TORPOR_RETURN_IF_ERROR(check_component(name));
    TORPOR_RETURN_IF_ERROR(check_component(to));
    const auto* const target = dynamic_cast<const LinuxDirectory*>(&into);
    const std::string doing = fmt::format("cannot link {} to {}/{}", join(name), into.path(), to);
    if (target == nullptr) return system_error(EXDEV, doing);
    if (::linkat(fd_.get(), std::string(name).c_str(), target->fd_.get(), std::string(to).c_str(), 0) != 0)
      return system_error(errno, doing);
    return ok();
  }

  Status remove_file(std::string_view name) override {
    TORPOR_RETURN_IF_ERROR(check_component(name));
    if (::unlinkat(fd_.get(), std::string(name).c_str(), 0) != 0) {
      return system_error(errno, fmt::format("cannot remove {}", join(name)));
    }
    return ok();
  }

  Status remove_tree(std::string_view name) override {
    TORPOR_RETURN_IF_ERROR(check_component(name));
    return remove_tree_at(fd_.get(), std::string(name), join(name));
  }

  Status sync() override {
    if (::fsync(fd_.get()) != 0) return system_error(errno, fmt::format("cannot sync the directory {}", path_));
    return ok();
  }

  Result<uint64_t> free_bytes() const override {
    struct statvfs info {};
    if (::fstatvfs(fd_.get(), &info) != 0)
      return system_error(errno, fmt::format("cannot ask for the free space of {}", path_));
    return static_cast<uint64_t>(info.f_bavail) * info.f_frsize;
  }

  Result<std::unique_ptr<File>> lock(std::string_view name) override {
    TORPOR_RETURN_IF_ERROR(check_component(name));
    TORPOR_ASSIGN_OR_RETURN(Descriptor fd, open_beneath(fd_.get(), std::string(name), O_RDWR | O_CREAT, kFileMode,
                                                        fmt::format("cannot open the lock {}", join(name))));
    if (::fchmod(fd.get(), kFileMode) != 0)
      return system_error(errno, fmt::format("cannot set the permissions of {}", join(name)));
    // An open-file-description lock: another close() in this process does not drop it; it ends when its last descriptor
    // is closed.
    struct flock request {};
    request.l_type = F_WRLCK;
    request.l_whence = SEEK_SET;
    if (::fcntl(fd.get(), F_OFD_SETLK, &request) != 0) {
      if (errno == EAGAIN || errno == EACCES) {
        return Error{.code = Code::kUnavailable,
                     .what = fmt::format("another process is using {}", path_),
                     .next_step = "wait for it, or give this engine a directory of its own",
                     .origin = Origin::kSystem,
                     .native = errno};
      }
      return system_error(errno, fmt::format("cannot lock {}", join(name)));
    }
    return std::unique_ptr<File>(std::make_unique<LinuxFile>(std::move(fd), join(name)));
  }

 private:
  std::string join(std::string_view name) const { return fmt::format("{}/{}", path_, name); }

  Result<std::unique_ptr<File>> open_as_file(std::string_view name, int flags, FileIo wish,
                                             std::string_view verb) const {
    TORPOR_RETURN_IF_ERROR(check_component(name));
    const std::string full = join(name);
    const std::string doing = fmt::format("cannot {} {}", verb, full);
    const mode_t mode = (flags & O_CREAT) ? kFileMode : 0;
    // Ask for direct I/O afterwards. If the file system has none, an open() with O_DIRECT fails after it has made the
    // file, and a second open() could find a file that somebody else has put there.
    Result<Descriptor> fd = open_beneath(fd_.get(), std::string(name), flags, mode, doing);
    if (!fd) return fd.error();
    TORPOR_RETURN_IF_ERROR(check_regular(fd->get(), full));
    const bool direct = wish != FileIo::kPlain && ::fcntl(fd->get(), F_SETFL, O_DIRECT) == 0;
    // Clear O_NONBLOCK, which kept a FIFO from blocking the open: with it io_uring would refuse to wait for the disk.
    if ((flags & O_NONBLOCK) && !direct && ::fcntl(fd->get(), F_SETFL, 0) != 0) return system_error(errno, doing);
    if ((flags & O_CREAT) && ::fchmod(fd->get(), kFileMode) != 0)
      return system_error(errno, fmt::format("cannot set the permissions of {}", full));
    if (wish == FileIo::kPlain) return std::unique_ptr<File>(std::make_unique<LinuxFile>(std::move(*fd), full));
    std::unique_ptr<CachedPages> pages;
    if (wish == FileIo::kCached && direct) pages = cached_pages(name, fd->get());
    return std::unique_ptr<File>(
        std::make_unique<FastFile>(std::move(*fd), full, direct, UringQueue::create(kUringDepth), std::move(pages)));
  }

  // Open the cached pages of the file `opened`. They need their own open file: the direct I/O flag is shared by all
  // duplicates of a descriptor.
  std::unique_ptr<CachedPages> cached_pages(std::string_view name, int opened) const {
    Result<Descriptor> again = open_beneath(fd_.get(), std::string(name), O_RDONLY | O_NONBLOCK, 0, "");
    struct stat one {};
    struct stat other {};
    const bool same = again && ::fstat(opened, &one) == 0 && ::fstat(again->get(), &other) == 0 &&
                      one.st_dev == other.st_dev && one.st_ino == other.st_ino;
    return same ? CachedPages::of(std::move(*again)) : nullptr;
  }

  static Status check_regular(int fd, const std::string& full) {
    struct stat info {};
    if (::fstat(fd, &info) != 0) return system_error(errno, fmt::format("cannot ask what {} is", full));
    if (S_ISREG(info.st_mode)) return check_owned(fd, info, full);
    return Error{
        .code = Code::kCorruption, .what = fmt::format("{} is not a regular file", full), .next_step = "remove it"};
  }

  static Result<std::vector<Entry>> list_descriptor(Descriptor fd, const std::string& path) {
    DIR* stream = ::fdopendir(fd.get());
    if (stream == nullptr) return system_error(errno, fmt::format("cannot list {}", path));
    fd.release();  // the stream owns it now
    const std::unique_ptr<DIR, int (*)(DIR*)> owner(stream, ::closedir);
    std::vector<Entry> entries;
    errno = 0;
    while (const dirent* item = ::readdir(stream)) {
      const std::string_view name = item->d_name;
      if (name == "." || name == "..") continue;
      EntryKind kind = EntryKind::kOther;
      struct stat info {};
      if (::fstatat(::dirfd(stream), item->d_name, &info, AT_SYMLINK_NOFOLLOW) == 0) {
        if (S_ISREG(info.st_mode)) kind = EntryKind::kFile;
        if (S_ISDIR(info.st_mode)) kind = EntryKind::kDirectory;
      }
      entries.push_back({std::string(name), kind});
      errno = 0;
    }
    if (errno != 0) return system_error(errno, fmt::format("cannot list {}", path));
    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.name < b.name; });
    return entries;
  }

  // Not boost::filesystem::remove_all: before version 1.80 a swapped link can lead it out of the tree.
  static Status remove_tree_at(int parent, const std::string& name, const std::string& full) {
    if (::unlinkat(parent, name.c_str(), 0) == 0) return ok();
    if (errno != EISDIR && errno != EPERM) return system_error(errno, fmt::format("cannot remove {}", full));
    TORPOR_ASSIGN_OR_RETURN(Descriptor fd,
                            open_beneath(parent, name, O_RDONLY | O_DIRECTORY, 0, fmt::format("cannot open {}", full)));
    TORPOR_ASSIGN_OR_RETURN(
        Descriptor listed, open_beneath(fd.get(), ".", O_RDONLY | O_DIRECTORY, 0, fmt::format("cannot list {}", full)));
    TORPOR_ASSIGN_OR_RETURN(const std::vector<Entry> entries, list_descriptor(std::move(listed), full));
    for (const Entry& entry : entries) {
      TORPOR_RETURN_IF_ERROR(remove_tree_at(fd.get(), entry.name, full + "/" + entry.name));
    }
    if (::unlinkat(parent, name.c_str(), AT_REMOVEDIR) != 0)
      return system_error(errno, fmt::format("cannot remove {}", full));
    return ok();
  }

  Descriptor fd_;
  std::string path_;
};

class LinuxFileSystem final : public FileSystem {
 public:
  Result<std::unique_ptr<Directory>> open_directory(const std::string& path, bool create) override {
    if (path.empty()) {
      return Error{
          .code = Code::kInvalidArgument, .what = "the directory's path is empty", .next_step = "name a directory"};
    }
    const std::string text = plain_path(path);
    if (create) TORPOR_RETURN_IF_ERROR(make_directories(text));
    TORPOR_ASSIGN_OR_RETURN(Descriptor fd, guarded(::open(text.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC),
                                                   fmt::format("cannot open the directory {}", text)));
    TORPOR_RETURN_IF_ERROR(check_owned(fd.get(), text));
    TORPOR_RETURN_IF_ERROR(check_parent(fd.get(), text));
    return std::unique_ptr<Directory>(std::make_unique<LinuxDirectory>(std::move(fd), text));
  }

 private:
  static Status sync_directory(const std::string& path) {
    TORPOR_ASSIGN_OR_RETURN(const Descriptor fd, guarded(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC),
                                                         fmt::format("cannot open the directory {}", path)));
    if (::fsync(fd.get()) != 0) return system_error(errno, fmt::format("cannot sync the directory {}", path));
    return ok();
  }

  static Status make_directories(const boost::filesystem::path& path) {
    boost::filesystem::path so_far;
    for (const boost::filesystem::path& component : path) {
      so_far /= component;
      if (::mkdir(so_far.c_str(), kDirectoryMode) == 0) {
        if (::chmod(so_far.c_str(), kDirectoryMode) != 0)
          return system_error(errno, fmt::format("cannot set the permissions of {}", so_far.string()));
        TORPOR_RETURN_IF_ERROR(sync_directory(so_far.parent_path().string()));
      } else if (errno != EEXIST && errno != EISDIR) {
        const int problem = errno;
        boost::system::error_code ignored;
        // it exists, but this user may not make it (EROFS, EACCES)
        if (boost::filesystem::is_directory(so_far, ignored)) continue;
        return system_error(problem, fmt::format("cannot make the directory {}", so_far.string()),
                            "check its permissions or choose another directory");
      }
    }
    return ok();
  }
};

}  // namespace

void File::pread_all(std::span<FilePart> parts) const {
  for (FilePart& part : parts) part.status = pread(part.bytes, part.offset);
}

void File::pwrite_all(std::span<FilePart> parts) {
  for (FilePart& part : parts) part.status = pwrite(part.bytes, part.offset);
}

std::string plain_path(const std::string& path) {
  const boost::filesystem::path normal = boost::filesystem::absolute(path).lexically_normal();
  return (normal.filename_is_dot() ? normal.parent_path() : normal).string();  // "a/" is "a/." there
}

FileSystem& linux_file_system() {
  static LinuxFileSystem file_system;
  return file_system;
}

}  // namespace torpor
