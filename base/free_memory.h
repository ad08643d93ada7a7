// SPDX-License-Identifier: Apache-2.0
// How much memory the system can still give this process. The machine bounds it, and so does each control group
// (version 1 or 2) above the process that has a limit. The page cache counts as free. All sizes are in bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torpor {

struct MemoryBound {
  uint64_t total = 0;
  uint64_t available = 0;
  uint64_t swap = 0;  // free swap space: the machine's, or what a group and those above it may still use
};

// Return all bounds, the machine's first. A bound that cannot be read is left out. `root` is put before each path;
// tests alone set it.
std::vector<MemoryBound> memory_bounds(const std::string& root = {});

// Return the bytes that are available under every bound; 0 if no bound can be read.
uint64_t free_memory(const std::string& root = {});
// Return the bytes after which the system would end a process, or hold it up (memory.high); none if no bound can be
// read. Swap space counts, as memory of others may go there.
std::optional<uint64_t> memory_before_kill(const std::string& root = {});
// Return the bytes that are available if half of each bound's total stays free. Use it for memory that is merely
// useful.
uint64_t spare_memory(const std::string& root = {});

}  // namespace torpor
