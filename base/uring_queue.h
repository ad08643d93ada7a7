// SPDX-License-Identifier: Apache-2.0
// UringQueue: many reads or writes of one file at once, through io_uring. Library: liburing. Threads: any; one batch
// runs at a time, other callers wait.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/file_system.h"

namespace torpor {

class UringQueue {
 public:
  // Make a queue for `depth` operations at once. Null: the system has no io_uring, or forbids it.
  static std::unique_ptr<UringQueue> create(unsigned depth);
  ~UringQueue();
  // Read or write every part at most once; return when none is under way any more. results[i]: the system call's result
  // for part i, bytes or -errno; -EAGAIN: it may not have been called.
  void run(int fd, bool write, std::span<const FilePart> parts, std::span<int32_t> results);

 private:
  struct Impl;
  explicit UringQueue(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace torpor
