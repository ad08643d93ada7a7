// SPDX-License-Identifier: Apache-2.0
#include "allocator/numa_memory.h"

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <system_error>

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fmt/core.h>

#include "allocator/prefault.h"
#include "base/log.h"
#include "base/status.h"

namespace torpor {
namespace {

constexpr int kMostNodes = 1024;  // Linux has no more

// Return those of `cores` on which the calling thread may run; empty if that is not known.
std::vector<int> usable(std::vector<int> cores) {
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return {};
  std::erase_if(cores, [&](int core) { return core < 0 || core >= CPU_SETSIZE || !CPU_ISSET(core, &allowed); });
  return cores;
}

}  // namespace

NumaSystem& linux_numa() {
  static NumaSystem system;
  return system;
}

int NumaSystem::prefer(std::byte* data, uint64_t size, int node) {
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  unsigned long mask[kMostNodes / kBits] = {};
  if (node < 0 || node >= kMostNodes) return EINVAL;
  mask[static_cast<size_t>(node) / kBits] = 1ul << (static_cast<size_t>(node) % kBits);
  return ::syscall(SYS_mbind, data, size, MPOL_PREFERRED, mask, kMostNodes + 1, 0) == 0
             ? 0
             : errno;  // mbind uses one bit less than the given number
}

std::vector<int> NumaSystem::cores(int node) {
  const std::string path = fmt::format("/sys/devices/system/node/node{}/cpulist", node);
  std::FILE* const file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return {};
  char list[4096];
  const size_t read = std::fread(list, 1, sizeof list, file);
  std::fclose(file);
  std::string_view text(list, read);
  while (text.ends_with('\n')) text.remove_suffix(1);
  return parse_cores(text);
}

void NumaSystem::touch(std::byte* data, uint64_t size, bool populate) { torpor::touch(data, size, populate); }

std::vector<int> parse_cores(std::string_view list) {
  std::vector<int> cores;
  const char* at = list.data();
  const char* const end = at + list.size();
  while (at != end) {
    int first = 0;
    auto read = std::from_chars(at, end, first);
    int last = first;
    if (read.ec == std::errc() && read.ptr != end && *read.ptr == '-') read = std::from_chars(read.ptr + 1, end, last);
    const bool ends = read.ptr == end || (*read.ptr == ',' && read.ptr + 1 != end);
    if (read.ec != std::errc() || !ends || first < 0 || last < first || last >= CPU_SETSIZE) return {};
    for (int core = first; core <= last; ++core) cores.push_back(core);
    at = read.ptr == end ? end : read.ptr + 1;
  }
  return cores;
}

void prefer_target(NumaSystem& system, NumaTarget& target, std::byte* data, uint64_t size) {
  if (!target.node || !target.cores.empty()) return;
  const int refused = system.prefer(data, size, *target.node);
  if (refused == 0) return;
  (void)try_catch([&] {
    target.cores = usable(system.cores(*target.node));
    const std::string why = std::generic_category().message(refused);
    if (target.cores.empty()) {
      log().warn("host memory comes from any NUMA node, copies may be slower: node {} refused: {}", *target.node, why);
    } else {
      log().info("NUMA node {} refused memory: {}; host memory is touched first on its {} cores instead", *target.node,
                 why, target.cores.size());
    }
    return ok();
  });
  if (target.cores.empty()) target.node.reset();
}

void touch_on_target(NumaSystem& system, const NumaTarget& target, std::byte* data, uint64_t size, bool populate) {
  const OnCores here(target.cores);
  system.touch(data, size, populate);
}

OnCores::OnCores(std::span<const int> cores) noexcept {
  if (cores.empty() || ::sched_getaffinity(0, sizeof before_, &before_) != 0) return;
  cpu_set_t wanted;
  CPU_ZERO(&wanted);
  for (const int core : cores) {
    if (core < CPU_SETSIZE && CPU_ISSET(core, &before_)) CPU_SET(core, &wanted);
  }
  if (CPU_COUNT(&wanted) == 0 || CPU_EQUAL(&wanted, &before_)) return;
  moved_ = ::sched_setaffinity(0, sizeof wanted, &wanted) == 0;
}

OnCores::~OnCores() {
  if (moved_) (void)::sched_setaffinity(0, sizeof before_, &before_);
}

}  // namespace torpor
