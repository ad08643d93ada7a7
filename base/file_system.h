// SPDX-License-Identifier: Apache-2.0
// Files through one seam: everything torpor stores goes through Directory and File, so that tests can fail, count and
// cut any call. The real one is Linux: directory descriptors, no symbolic link is ever followed below the opened path,
// files 0600 in directories 0700 whatever the umask, O_CLOEXEC. Files and directories that belong to others, or that
// others may write to, are refused (kFailedPrecondition); so is a directory that is opened by its path when its parent
// belongs to others or everybody may write to it. A group may write if this process is in it and there is no access
// control list.
//
// Threads: File::pread, pwrite and sync may be called from several threads at once; all else from one at a time.
// Names are single path components; one with '/', or "." or "..", is kInvalidArgument.
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

// One read or write of several.
struct FilePart {
  uint64_t offset = 0;
  std::span<std::byte> bytes;
  Status status;
};

class File {
 public:
  virtual ~File() = default;  // closes; an error of close is not reported, so sync() first
  virtual Result<uint64_t> size() const = 0;
  // Reads exactly bytes.size() bytes. Fewer in the file: kCorruption that names the file and both lengths.
  virtual Status pread(std::span<std::byte> bytes, uint64_t offset) const = 0;
  // Writes all, also after short writes and EINTR. kResourceExhausted when the disk is full.
  virtual Status pwrite(std::span<const std::byte> bytes, uint64_t offset) = 0;
  // Several at once, each with its own status. Default: one after the other.
  virtual void pread_all(std::span<FilePart> parts) const;
  virtual void pwrite_all(std::span<FilePart> parts);
  virtual Status preallocate(uint64_t size) = 0;  // kResourceExhausted when there is no room; a no-op where unsupported
  virtual Status truncate(uint64_t size) = 0;     // to exactly this size
  // fsync. A failure is final for this file: its content may be gone, do not call again, discard the file.
  virtual Status sync() = 0;
  virtual const std::string& name() const = 0;  // for messages: path as far as known
  virtual std::string_view io() const {
    return "plain";
  }  // how bytes go: "io_uring, direct", "io_uring", "direct", "plain"
};

// kFastest: with direct I/O and io_uring where the system allows them. Direct: addresses, offsets and lengths must be
// multiples of 4096; the owner keeps to that in any case. kCached: the same, but pread_all() takes from the page cache
// what lies there: for who wants the bytes, not to know what is on the disk.
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
                                                    FileIo wish = FileIo::kPlain) = 0;  // must not exist yet
  virtual Result<std::unique_ptr<File>> open_file(std::string_view name,
                                                  FileIo wish = FileIo::kPlain) const = 0;  // read only; a regular file
  // For reading and writing in place, made if absent.
  virtual Result<std::unique_ptr<File>> open_slots(std::string_view name, FileIo wish = FileIo::kFastest) = 0;
  virtual Result<std::unique_ptr<Directory>> create_directory(std::string_view name) = 0;  // must not exist yet
  virtual Result<std::unique_ptr<Directory>> open_directory(std::string_view name) const = 0;
  virtual Result<std::vector<Entry>> list() const = 0;                        // sorted by name, without "." and ".."
  virtual Status rename_new(std::string_view from, std::string_view to) = 0;  // atomic; `to` must not exist
  // One more name, `to` in `into`, for the file `name`; both are the same file from then on, and it is there until its
  // last name is removed. `to` must not exist. Where the file system has no links, or none from here to there, `native`
  // is EPERM, EXDEV, EMLINK or EOPNOTSUPP. Durable when `into` was synced, like any name.
  virtual Status link_new(std::string_view name, Directory& into, std::string_view to) = 0;
  virtual Status remove_file(std::string_view name) = 0;
  virtual Status remove_tree(std::string_view name) = 0;  // never leaves the tree through a link
  virtual Status sync() = 0;                              // makes entries of this directory durable
  virtual Result<uint64_t> free_bytes() const = 0;        // what an unprivileged writer may still use
  // Take an exclusive lock on the file `name` (made if absent). It is held until the result is destroyed or the process
  // has ended, however it ends; but a child that was forked meanwhile and runs no other program holds it, too, until it
  // has ended. kUnavailable: another holder has it.
  virtual Result<std::unique_ptr<File>> lock(std::string_view name) = 0;
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  // `create`: makes the directory and its missing parents (0700), durably.
  virtual Result<std::unique_ptr<Directory>> open_directory(const std::string& path, bool create) = 0;
};

// The machine's file system. Lives for the whole process.
FileSystem& linux_file_system();

}  // namespace torpor
