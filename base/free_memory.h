// SPDX-License-Identifier: Apache-2.0
// How much memory the system can still give this process: the machine, and each control group above the process that
// has a limit (version 2 or 1). What is only cached of files counts as free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace torpor {

struct MemoryBound {
  uint64_t total = 0;
  uint64_t available = 0;
};

// The machine's own first. `root` is before each path: "" but in tests. A bound that cannot be read is left out.
std::vector<MemoryBound> memory_bounds(const std::string& root = {});

// What may be taken under all of them; 0 where none can be read.
uint64_t free_memory(const std::string& root = {});
// The same with half of each left free: what a process may take that only might need it.
uint64_t spare_memory(const std::string& root = {});

}  // namespace torpor
