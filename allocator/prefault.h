// SPDX-License-Identifier: Apache-2.0
// Memory fresh from the system: mapped and brought up, so that later use pays no page fault. From which NUMA node:
// allocator/numa_memory.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace torpor {

// At a multiple of a huge page, and in no core file; null when the system has none.
std::byte* map_fresh(uint64_t size);
void unmap_fresh(std::byte* data, uint64_t size);  // of that, from a page on; nothing of 0 bytes
void prefer_huge_pages(std::byte* data, uint64_t size, bool huge);

// How it is brought up. Which way is the fastest differs from machine to machine.
struct PrefaultMethod {
  bool huge_pages = true;
  bool populate = false;  // by madvise(MADV_POPULATE_WRITE), else by touching each page
  int threads = 1;
};
std::string to_string(const PrefaultMethod& method);        // "huge pages, populated, 8 threads"
void touch(std::byte* data, uint64_t size, bool populate);  // on this thread
using TouchPages = std::function<void(std::byte* data, uint64_t size, bool populate)>;
// Makes every page present. Several threads, because faults of one process scale; each calls `touch`.
void prefault(std::byte* data, uint64_t size, const PrefaultMethod& method, const TouchPages& touch = torpor::touch);
// Tries the ways on some MiB each, about a tenth of a second in all, and returns the fastest.
PrefaultMethod fastest_prefault(int threads);

}  // namespace torpor
