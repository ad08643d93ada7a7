// SPDX-License-Identifier: Apache-2.0
// UringQueue: many reads or writes of one file at once through io_uring. Library: liburing.
// Threads: one batch at a time; others wait.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/file_system.h"

namespace torpor {

class UringQueue {
 public:
  // With room for `depth` operations at once. Null where the system has no io_uring or forbids it.
  static std::unique_ptr<UringQueue> create(unsigned depth);
  ~UringQueue();
  // Reads or writes every part once and returns when none is under way any more: what the system call returned for
  // each, bytes or -errno.
  void run(int fd, bool write, std::span<const FilePart> parts, std::span<int32_t> results);

 private:
  struct Impl;
  explicit UringQueue(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace torpor
