// SPDX-License-Identifier: Apache-2.0
// SharedCapacity: bytes that processes of one machine take from one amount, as from the memory of a device. What a
// process has taken is free again when it ends, however it ends.
//
// Each taken byte is a locked byte of a file: open file description locks (fcntl(2)), which the kernel releases when
// the last descriptor is closed. A forked child has its parent's descriptor, so it keeps what its parent had taken.
// Which bytes of the file are locked says nothing: a request may get several ranges.
//
// Threads: any.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/linux_file.h"
#include "base/mutex.h"
#include "base/status.h"

namespace torpor {

class SharedCapacity {
 public:
  // Open the file; make it, 0600, if it is not there. All who share it give the same number of bytes.
  static Result<std::unique_ptr<SharedCapacity>> open(const std::string& file, uint64_t bytes);

  // kResourceExhausted: fewer are free; then none is taken.
  Status take(uint64_t bytes);
  void give_back(uint64_t bytes);              // of what this object has taken
  std::optional<uint64_t> used_bytes() const;  // by all processes; none if the system does not say

 private:
  struct Range {
    uint64_t begin = 0;
    uint64_t end = 0;
    uint64_t bytes() const { return end - begin; }
  };

  class Turn;  // while it lives, no other object takes
  SharedCapacity(Descriptor file, uint64_t bytes) : bytes_(bytes), file_(std::move(file)) {}
  // Set or remove locks. `command` is F_OFD_SETLK, or F_OFD_SETLKW to wait for the lock.
  Status lock(Range range, short type, int command) const;
  // Add the parts of `within` that other objects have taken, in any order.
  Status add_foreign(Range within, std::vector<Range>& found) const;
  // Return what nobody has taken, in the order of the file.
  Result<std::vector<Range>> free_ranges() const TORPOR_REQUIRES(mutex_);
  void release(uint64_t bytes) TORPOR_REQUIRES(mutex_);

  const uint64_t bytes_;
  const Descriptor file_;
  mutable Mutex mutex_;
  std::vector<Range> own_ TORPOR_GUARDED_BY(mutex_);
};

}  // namespace torpor
