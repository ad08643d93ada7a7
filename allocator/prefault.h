// SPDX-License-Identifier: Apache-2.0
// New memory from the system, mapped and prefaulted, so that later use causes no page fault. The NUMA node:
// allocator/numa_memory.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace torpor {

// Map memory at a multiple of a huge page, excluded from core files. Null: the system has none.
std::byte* map_fresh(uint64_t size);
void unmap_fresh(std::byte* data, uint64_t size);  // unmap from a page on; 0 bytes: nothing
void prefer_huge_pages(std::byte* data, uint64_t size, bool huge);
// Make the whole pages of a range present before they are written: one call costs less than a page fault for each.
// Content stays. Does nothing where the system cannot (Linux before 5.14).
void populate(std::byte* data, uint64_t size);

// How to prefault. The fastest method differs between machines.
struct PrefaultMethod {
  bool huge_pages = true;
  bool populate = false;  // with madvise(MADV_POPULATE_WRITE); else by touching each page
  int threads = 1;
};
std::string to_string(const PrefaultMethod& method);        // "huge pages, populated, 8 threads"
void touch(std::byte* data, uint64_t size, bool populate);  // on this thread
using TouchPages = std::function<void(std::byte* data, uint64_t size, bool populate)>;
// Make every page present. Several threads call `touch`, because page faults of one process scale.
void prefault(std::byte* data, uint64_t size, const PrefaultMethod& method, const TouchPages& touch = torpor::touch);
// Measure each method with some MiB, for about a tenth of a second in all. Return the fastest.
PrefaultMethod fastest_prefault(int threads);

// Says whether new memory shall be in huge pages. Null: always.
using HugePages = std::function<bool()>;
// Make a function that says yes if the first use of huge pages takes at most as long as that of small pages. It
// measures both with 8 MiB, and again when that is a second old.
//
// Huge pages take longer if the kernel has to compact memory for them, or if a hypervisor has taken free ones back and
// has to give them again.
HugePages huge_pages_while_fast();

}  // namespace torpor
