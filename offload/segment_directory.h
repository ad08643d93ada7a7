// SPDX-License-Identifier: Apache-2.0
// SegmentDirectory: the directory of a rank's segment files: who owns it, and the files by the numbers of their
// segments.
//
// A Directory serves one thread at a time; here the others wait for their turn. Freeing the disk space of a segment may
// take tens of milliseconds, so a thread that must not wait queues the removal for one that may.
//
// Owner: SegmentStore, until it ends; then queued files are removed. Threads: any. The lock is not held over calls of
// the file system, and a thread that waits for its turn holds no lock of its own. Failure: errors are values. A file
// that cannot be removed is logged; the next process finds it again, and its records are still valid.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/file_system.h"
#include "base/mutex.h"
#include "base/status.h"

namespace torpor {

class SegmentDirectory {
 public:
  // Make the directory if it is absent, and lock it. kUnavailable: another process has it for longer than `lock_wait`.
  static Result<std::unique_ptr<SegmentDirectory>> open(FileSystem& file_system, const std::string& path,
                                                        std::chrono::milliseconds lock_wait);
  ~SegmentDirectory() { remove_queued(); }

  struct Content {
    std::vector<uint64_t> numbers;  // ascending
    uint64_t bytes = 0;             // of the files that can be opened
  };
  Result<Content> content();
  Result<uint64_t> free_bytes();
  const std::string& path() const { return path_; }

  Result<std::unique_ptr<File>> create(uint64_t number, FileIo io);
  Result<std::unique_ptr<File>> open_file(uint64_t number, FileIo io);
  Status sync();  // makes the names of files durable
  Status link(uint64_t number, Directory& into, const std::string& name);

  void remove(uint64_t number) noexcept;
  // Queue a removal for the next remove_queued(). `file` stays open until then. Return false if there is no memory to
  // queue it; nothing is removed then.
  bool remove_later(uint64_t number, std::shared_ptr<File> file) noexcept;
  void remove_queued() noexcept;

 private:
  class Turn;
  struct Removal {
    uint64_t number = 0;
    std::shared_ptr<File> file;
  };
  SegmentDirectory(std::unique_ptr<Directory> directory, std::unique_ptr<File> lock);

  const std::unique_ptr<Directory> directory_;  // used through Turn
  const std::unique_ptr<File> lock_;
  const std::string path_;
  Mutex mutex_;
  CondVar turn_ended_;
  bool busy_ TORPOR_GUARDED_BY(mutex_) = false;
  std::vector<Removal> queued_ TORPOR_GUARDED_BY(mutex_);
};

}  // namespace torpor
