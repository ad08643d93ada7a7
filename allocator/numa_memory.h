// SPDX-License-Identifier: Apache-2.0
// Memory of one NUMA node. mbind asks the system for it. If the system refuses mbind, as Docker's default seccomp
// profile does, threads that run on the node's cores touch the memory first.
//
// Owner: the arena, which remembers whether the system refused. linux_numa() belongs to the process. Threads: any.
// Failure: memory comes from any node, which is slower but correct.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include <sched.h>

namespace torpor {

// The system's NUMA functions, for Linux. Tests replace them.
class NumaSystem {
 public:
  virtual ~NumaSystem() = default;
  // Ask that pages of untouched memory come from `node`, or from others when it is full. Return 0 or the system's
  // error.
  virtual int prefer(std::byte* data, uint64_t size, int node);
  // Return the numbers of the node's cores; empty if they are not known.
  virtual std::vector<int> cores(int node);
  // Make the pages present, on this thread.
  virtual void touch(std::byte* data, uint64_t size, bool populate);
};
NumaSystem& linux_numa();

// Parse a list in Linux's form: "0-3,8,10-11". Empty if it is no such list.
std::vector<int> parse_cores(std::string_view list);

// The node from which memory shall come.
struct NumaTarget {
  std::optional<int> node{};  // none: any
  std::vector<int> cores{};   // not empty: the system refused mbind, so threads on these cores touch the memory first
};
// Ask for memory of the target's node for untouched pages. If the system refuses, fill target.cores with the node's
// cores that this thread may use; if there are none, reset target.node. Log either.
void prefer_target(NumaSystem& system, NumaTarget& target, std::byte* data, uint64_t size);
// Make the pages present on this thread, which runs on the target's cores meanwhile.
void touch_on_target(NumaSystem& system, const NumaTarget& target, std::byte* data, uint64_t size, bool populate);

// OnCores: while it lives, the calling thread runs on those of `cores` that it may use. If it may use none, or the
// system refuses, nothing changes.
class OnCores {
 public:
  explicit OnCores(std::span<const int> cores) noexcept;
  ~OnCores();
  OnCores(const OnCores&) = delete;
  OnCores& operator=(const OnCores&) = delete;

 private:
  cpu_set_t before_;
  bool moved_ = false;
};

}  // namespace torpor
