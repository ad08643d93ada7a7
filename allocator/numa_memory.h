// SPDX-License-Identifier: Apache-2.0
// Memory of one NUMA node: asked of the system (mbind), or, where the system refuses that, as Docker's default
// seccomp profile does, touched first by threads that run on the node's cores.
//
// Owner: the arena, which keeps what it found out; linux_numa() is the process's. Threads: any. Failure: memory comes
// from any node, which is slower and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include <sched.h>

namespace torpor {

// Linux, as far as NUMA goes. Tests replace it.
class NumaSystem {
 public:
  virtual ~NumaSystem() = default;
  // Ask that pages of untouched memory come from `node`, from others when it is full. Return 0 or the system's error.
  virtual int prefer(std::byte* data, uint64_t size, int node);
  // Return the numbers of the node's cores; none where they are not known.
  virtual std::vector<int> cores(int node);
  // Make pages present, on this thread.
  virtual void touch(std::byte* data, uint64_t size, bool populate);
};
NumaSystem& linux_numa();

// The numbers of a list as Linux writes it: "0-3,8,10-11". None if it is not such a list.
std::vector<int> parse_cores(std::string_view list);

// Where memory is to come from.
struct NumaTarget {
  std::optional<int> node{};  // none: any
  std::vector<int> cores{};   // not empty: the system refused; threads on these touch the memory first
};
// Ask for untouched memory of the target's node. If the system refuses, the target becomes those of the node's cores
// that this thread may use, or any node where there is none; the log says so.
void prefer_target(NumaSystem& system, NumaTarget& target, std::byte* data, uint64_t size);
// Make pages present, on this thread, for which it runs on the target's cores meanwhile.
void touch_on_target(NumaSystem& system, const NumaTarget& target, std::byte* data, uint64_t size, bool populate);

// The calling thread runs on those of `cores` that it may use, while this object lives. If it may use none of them, or
// the system refuses, it runs where it did.
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
