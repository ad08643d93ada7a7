// SPDX-License-Identifier: Apache-2.0
#include "base/free_memory.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

#include "base/units.h"

namespace torpor {
namespace {

// Version 1 has them where the kernel accounts for swap.
constexpr const char* kMemoryAndSwap = "/memory.memsw.limit_in_bytes";
constexpr const char* kMemoryAndSwapUsed = "/memory.memsw.usage_in_bytes";
constexpr uint64_t kNoLimit = uint64_t{1} << 60;  // version 1 writes about 2^63 if there is no limit

// Return the sum of the numbers that follow these words, one a line; none if no line has one of them.
std::optional<uint64_t> sum_of(const std::string& path, const std::vector<std::string>& words) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::optional<uint64_t> sum;
  for (std::string line; std::getline(file, line);) {
    std::istringstream in(line);
    std::string word;
    uint64_t number = 0;
    if (in >> word >> number && std::find(words.begin(), words.end(), word) != words.end())
      sum = sum.value_or(0) + number;
  }
  return sum;
}

// Return the number in a file; none if there is no such file, or it says "max".
std::optional<uint64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  uint64_t number = 0;
  if (!(file >> number) || number >= kNoLimit) return std::nullopt;
  return number;
}

struct GroupFiles {  // of one version of control groups
  std::string mount;
  std::vector<std::string> limits;
  std::string used;
  std::vector<std::string> cached;
  uint64_t machine_swap = 0;
};

std::optional<MemoryBound> bound_of(const std::string& group, const GroupFiles& files) {
  uint64_t total = std::numeric_limits<uint64_t>::max();
  for (const std::string& limit : files.limits) total = std::min(total, number_in(group + limit).value_or(total));
  const std::optional<uint64_t> used = number_in(group + files.used);
  if (total == std::numeric_limits<uint64_t>::max() || !used) return std::nullopt;
  const uint64_t cached = sum_of(group + "/memory.stat", files.cached).value_or(0);
  const auto left_of = [cached](uint64_t limit, uint64_t used) {
    return limit - std::min(limit, used - std::min(used, cached));
  };
  MemoryBound bound{.total = total, .available = left_of(total, *used), .swap = files.machine_swap};
  if (const std::optional<uint64_t> both = number_in(group + kMemoryAndSwap)) {
    const uint64_t left = left_of(*both, number_in(group + kMemoryAndSwapUsed).value_or(*used));
    bound.available = std::min(bound.available, left);
    bound.swap = std::min(bound.swap, left - bound.available);
  }
  return bound;
}

// Add the bounds of the group and of all groups above it. What a group swaps counts for those above it, too.
void add_groups(std::vector<MemoryBound>& bounds, std::string group, const GroupFiles& files) {
  if (group == "/") group.clear();
  const size_t first = bounds.size();
  while (true) {
    const std::string folder = files.mount + group;
    if (const std::optional<MemoryBound> bound = bound_of(folder, files)) bounds.push_back(*bound);
    if (const std::optional<uint64_t> most = number_in(folder + "/memory.swap.max")) {
      const uint64_t swapped = number_in(folder + "/memory.swap.current").value_or(0);
      for (size_t i = first; i < bounds.size(); ++i)
        bounds[i].swap = std::min(bounds[i].swap, *most - std::min(*most, swapped));
    }
    if (group.empty()) return;
    group.erase(group.rfind('/'));
  }
}

}  // namespace

std::vector<MemoryBound> memory_bounds(const std::string& root) {
  std::vector<MemoryBound> bounds;
  const std::string machine = root + "/proc/meminfo";
  const uint64_t total = sum_of(machine, {"MemTotal:"}).value_or(0) * kKiB;
  const std::optional<uint64_t> available = sum_of(machine, {"MemAvailable:"});
  const uint64_t swap = sum_of(machine, {"SwapFree:"}).value_or(0) * kKiB;
  if (total > 0 && available) bounds.push_back({.total = total, .available = *available * kKiB, .swap = swap});
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t names = line.find(':');
    const size_t path = names == std::string::npos ? names : line.find(":/", names + 1);
    if (path == std::string::npos) continue;
    const std::string controllers = "," + line.substr(names + 1, path - names - 1) + ",";
    const std::string group = line.substr(path + 1);
    const std::string mount = root + "/sys/fs/cgroup";
    if (controllers == ",,") {
      add_groups(bounds, group,
                 {.mount = mount,
                  .limits = {"/memory.max", "/memory.high"},
                  .used = "/memory.current",
                  .cached = {"inactive_file", "active_file", "slab_reclaimable"},
                  .machine_swap = swap});
    } else if (controllers.find(",memory,") != std::string::npos) {
      add_groups(bounds, group,
                 {.mount = mount + "/memory",
                  .limits = {"/memory.limit_in_bytes"},
                  .used = "/memory.usage_in_bytes",
                  .cached = {"total_inactive_file", "total_active_file"},
                  .machine_swap = swap});
    }
  }
  return bounds;
}

uint64_t free_memory(const std::string& root) {
  uint64_t least = std::numeric_limits<uint64_t>::max();
  const std::vector<MemoryBound> bounds = memory_bounds(root);
  for (const MemoryBound& bound : bounds) least = std::min(least, bound.available);
  return bounds.empty() ? 0 : least;
}

std::optional<uint64_t> memory_before_kill(const std::string& root) {
  std::optional<uint64_t> least;
  for (const MemoryBound& bound : memory_bounds(root))
    least = std::min(least.value_or(std::numeric_limits<uint64_t>::max()), bound.available + bound.swap);
  return least;
}

uint64_t spare_memory(const std::string& root) {
  uint64_t least = std::numeric_limits<uint64_t>::max();
  const std::vector<MemoryBound> bounds = memory_bounds(root);
  for (const MemoryBound& bound : bounds)
    least = std::min(least, bound.available - std::min(bound.available, bound.total / 2));
  return bounds.empty() ? 0 : least;
}

}  // namespace torpor
