// SPDX-License-Identifier: Apache-2.0
// Files behind one interface. Everything that torpor stores goes through Directory and File, so that tests can count
// calls and make any of them fail.
//
// The real implementation is Linux. It uses directory descriptors and O_CLOEXEC, follows no symbolic link below the
// opened path, and makes files 0600 in directories 0700 whatever the umask. It refuses files and directories that
// belong to others or that others may write to (kFailedPrecondition). It refuses a directory opened by path if its
// parent belongs to others or everybody may write to it. A group may have write access if this process is in it and
// there is no access control list.
//
// Threads: several threads at once may call File::pread, pwrite and sync. One thread at a time may call any other
// method of a file or directory.
//
// Names are single path components. kInvalidArgument: the name contains '/', or is "." or "..".
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace torpor {

// One of several reads or writes.
struct FilePart {
  uint64_t offset = 0;
  std::span<std::byte> bytes;
  Status status;
};

class File {
 public:
  // Closes the file. An error of close is not reported, so call sync() first.
  virtual ~File() = default;
  virtual Result<uint64_t> size() const = 0;
  // Read exactly bytes.size() bytes. If the file has fewer: kCorruption, with the file and both lengths.
  virtual Status pread(std::span<std::byte> bytes, uint64_t offset) const = 0;
  // Write all bytes, also after short writes and EINTR. kResourceExhausted: the disk is full.
  virtual Status pwrite(std::span<const std::byte> bytes, uint64_t offset) = 0;
  // Read or write several parts; each gets its own status. Default: one after the other.
  virtual void pread_all(std::span<FilePart> parts) const;
  virtual void pwrite_all(std::span<FilePart> parts);
  // Reserve disk space for `size` bytes. A no-op where the file system cannot. kResourceExhausted: the disk is full.
  virtual Status preallocate(uint64_t size) = 0;
  virtual Status truncate(uint64_t size) = 0;  // set exactly this size
  // fsync. A failure is final for this file: its content may be gone. Do not call again; discard the file.
  virtual Status sync() = 0;
  virtual const std::string& name() const = 0;  // for messages: the path as far as it is known
  // Return how bytes are transferred: "io_uring, direct", "io_uring", "direct" or "plain".
  virtual std::string_view io() const {
    return "plain";  // the default
  }
};

// kFastest: with direct I/O and io_uring where the system allows them. Direct I/O needs addresses, offsets and lengths
// that are multiples of 4096; the caller keeps to that in any case. kCached: the same, but pread_all() takes bytes from
// the page cache if they lie there. Use it to get the bytes, not to check what is on the disk.
enum class FileIo : uint8_t { kFastest, kCached, kPlain };

enum class EntryKind : uint8_t { kFile, kDirectory, kOther };
struct Entry {
  std::string name;
  EntryKind kind = EntryKind::kOther;
};

class Directory {
 public:
  virtual ~Directory() = default;
  virtual const std::string& path() const = 0;
  virtual Result<std::unique_ptr<File>> create_file(std::string_view name,
                                                    FileIo wish = FileIo::kPlain) = 0;  // `name` must not exist yet
  virtual Result<std::unique_ptr<File>> open_file(std::string_view name,
                                                  FileIo wish = FileIo::kPlain) const = 0;  // read only; a regular file
  // Open a file for reading and writing in place; make it if it is absent.
  virtual Result<std::unique_ptr<File>> open_slots(std::string_view name, FileIo wish = FileIo::kFastest) = 0;
  virtual Result<std::unique_ptr<Directory>> create_directory(std::string_view name) = 0;  // must not exist yet
  virtual Result<std::unique_ptr<Directory>> open_directory(std::string_view name) const = 0;
  virtual Result<std::vector<Entry>> list() const = 0;                        // sorted by name, without "." and ".."
  virtual Status rename_new(std::string_view from, std::string_view to) = 0;  // atomic; `to` must not exist
  // Give the file `name` another name: `to` in `into`. `to` must not exist. The file exists until its last name is
  // removed. The new name is durable after `into` is synced. If the file system has no links, or none between these
  // directories, `native` is EPERM, EXDEV, EMLINK or EOPNOTSUPP.
  virtual Status link_new(std::string_view name, Directory& into, std::string_view to) = 0;
  virtual Status remove_file(std::string_view name) = 0;
  virtual Status remove_tree(std::string_view name) = 0;  // never leaves the tree through a link
  virtual Status sync() = 0;                              // makes the entries of this directory durable
  virtual Result<uint64_t> free_bytes() const = 0;        // bytes that an unprivileged writer may still use
  // Take an exclusive lock on the file `name`; make the file if it is absent. The lock is held until the result is
  // destroyed or the process has ended, however it ends. A child that was forked meanwhile and runs no other program
  // also holds it until that child has ended. kUnavailable: another holder has it.
  virtual Result<std::unique_ptr<File>> lock(std::string_view name) = 0;
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  // Open a directory; its path() is then plain_path(). `create`: make it and its missing parents (0700), durably.
  virtual Result<std::unique_ptr<Directory>> open_directory(const std::string& path, bool create) = 0;
};

// Return `path` as an absolute one, without "." and ".." in it and without a slash at its end: what follows its last
// slash is a name. No link is read.
std::string plain_path(const std::string& path);

// Return the machine's file system. It lives for the whole process.
FileSystem& linux_file_system();

}  // namespace torpor
