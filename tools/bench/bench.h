// SPDX-License-Identifier: Apache-2.0
// What the benchmark programs share: errors end them, times are medians of rounds after one that only warms.
#pragma once

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <fmt/core.h>

#include "base/status.h"
#include "base/units.h"

namespace torpor::bench {

template <class T>
T must(Result<T> result) {
  if (result) return std::move(*result);
  fmt::print(stderr, "error: {}\n", result.error().to_string());
  std::exit(2);
}
inline void must(const Status& status) {
  if (status) return;
  fmt::print(stderr, "error: {}\n", status.error().to_string());
  std::exit(2);
}

inline double seconds(const std::function<void()>& work) {
  const auto began = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

// Of all threads of this process: says something on a machine that others use, too.
inline double cpu_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

inline unsigned cores() { return std::clamp(std::thread::hardware_concurrency(), 1u, 8u); }

// work(part, parts) on every core at once.
inline void on_all_cores(const std::function<void(uint64_t, uint64_t)>& work) {
  const uint64_t parts = cores();
  std::vector<std::thread> others;
  for (uint64_t part = 1; part < parts; ++part) others.emplace_back(work, part, parts);
  work(0, parts);
  for (std::thread& thread : others) thread.join();
}

// Memory that was touched, in huge pages where the system gives them.
class WarmMemory {
 public:
  explicit WarmMemory(uint64_t bytes)
      : data_(static_cast<std::byte*>(std::aligned_alloc(kHugePage, align_up(bytes, kHugePage))), std::free),
        bytes_(bytes) {
    ::madvise(data_.get(), align_up(bytes, kHugePage), MADV_HUGEPAGE);
    std::memset(data_.get(), 1, bytes);
  }
  std::span<std::byte> bytes() const { return {data_.get(), bytes_}; }

 private:
  std::unique_ptr<std::byte, void (*)(void*)> data_;
  uint64_t bytes_;
};

}  // namespace torpor::bench
