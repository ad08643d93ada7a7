// SPDX-License-Identifier: Apache-2.0
// Finds bytes anywhere in this process, to damage what a test cannot reach otherwise.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

namespace torpor::test {

constexpr uint64_t kMostOfAPiece = 256ull << 20;

// Return the addresses of these bytes in writable memory, without `pattern` itself.
inline std::vector<uint64_t> addresses_of(std::span<const std::byte> pattern) {
  std::vector<uint64_t> found;
  std::vector<std::byte> piece((1 << 20) + pattern.size());
  const int memory = ::open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
  std::FILE* const maps = std::fopen("/proc/self/maps", "re");
  char line[512];
  while (maps != nullptr && std::fgets(line, sizeof line, maps) != nullptr) {
    uint64_t begin = 0;
    uint64_t end = 0;
    char access[5] = "";
    if (std::sscanf(line, "%lx-%lx %4s", &begin, &end, access) != 3 || std::strncmp(access, "rw", 2) != 0) continue;
    if (end - begin > kMostOfAPiece) continue;  // a sanitizer's memory
    for (uint64_t at = begin; at < end; at += 1 << 20) {
      const size_t wanted = std::min<uint64_t>(piece.size(), end - at);
      const ssize_t got = ::pread(memory, piece.data(), wanted, static_cast<off_t>(at));
      if (got <= 0) break;
      const std::byte* from = piece.data();
      const std::byte* const stop = piece.data() + got;
      while (const void* const place =
                 ::memmem(from, static_cast<size_t>(stop - from), pattern.data(), pattern.size())) {
        from = static_cast<const std::byte*>(place);
        const uint64_t address = at + static_cast<uint64_t>(from - piece.data());
        const auto inside = [&](const void* first, size_t bytes) {
          const auto start = reinterpret_cast<uint64_t>(first);
          return address >= start && address < start + bytes;
        };
        const bool known = !found.empty() && found.back() == address;
        if (!known && !inside(pattern.data(), pattern.size()) && !inside(piece.data(), piece.size()))
          found.push_back(address);
        ++from;
      }
    }
  }
  if (maps != nullptr) std::fclose(maps);
  ::close(memory);
  return found;
}

// Overwrite the byte at this address. A sanitizer may take it for unused: copies of a pattern are left on stacks, too.
inline void overwrite_at(uint64_t address, std::byte value) {
  const int memory = ::open("/proc/self/mem", O_RDWR | O_CLOEXEC);
  (void)!::pwrite(memory, &value, 1, static_cast<off_t>(address));
  ::close(memory);
}

}  // namespace torpor::test
