// SPDX-License-Identifier: Apache-2.0
// What Linux says of a mapping of this process.
#pragma once

#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>

namespace torpor::test {

// Return the flags of the mapping that has `address`, as /proc/self/smaps lists them: " hg" asks for huge pages, " nh"
// forbids them. Empty: there is no such mapping.
inline std::string flags_of_memory_at(const void* address) {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  std::ifstream file("/proc/self/smaps");
  bool found = false;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    uintptr_t from = 0;
    uintptr_t to = 0;
    char dash = 0;
    if (words >> std::hex >> from >> dash >> to && dash == '-') found = from <= wanted && wanted < to;
    if (found && line.starts_with("VmFlags:")) return line;
  }
  return "";
}

}  // namespace torpor::test
