// SPDX-License-Identifier: Apache-2.0
// Bytes that this process read from disks, and control of the page cache: for tests of reads that bypass it or use it.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>

#include <fcntl.h>
#include <unistd.h>

namespace torpor::test {

// Return the bytes read so far, with io_uring's.
inline uint64_t read_from_disk() {
  std::ifstream file("/proc/self/io");
  for (std::string name; file >> name;) {
    uint64_t number = 0;
    file >> number;
    if (name == "read_bytes:") return number;
  }
  return 0;
}

// Drop synced pages of a file from the page cache. `bytes` 0: to the end. Return false if that failed.
inline bool forget_cached(const std::string& path, uint64_t offset = 0, uint64_t bytes = 0) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const int failed = ::posix_fadvise(fd, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
  ::close(fd);
  return failed == 0;
}

// Read a file into the page cache.
inline void make_cached(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes(1 << 16, '\0');
  while (file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()))) {}
}

}  // namespace torpor::test
