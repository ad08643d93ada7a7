// SPDX-License-Identifier: Apache-2.0
#include "allocator/prefault.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include <sys/mman.h>

#include <fmt/core.h>

#include "base/mutex.h"
#include "base/units.h"

namespace torpor {
namespace {

constexpr uint64_t kTrialBytes = 32 * kMiB;
constexpr uint64_t kProbeBytes = 8 * kMiB;
constexpr std::chrono::seconds kProbeHolds{1};  // the memory of one wake is mapped in several calls
constexpr int kTrials = 2;  // of each method; the first may meet memory that a hypervisor has not backed yet

using Clock = std::chrono::steady_clock;

// How long the first use of new memory takes; null: the system has none.
std::optional<Clock::duration> first_use(uint64_t bytes, bool huge) {
  std::byte* const data = map_fresh(bytes);
  if (data == nullptr) return std::nullopt;
  prefer_huge_pages(data, bytes, huge);
  const auto began = Clock::now();
  touch(data, bytes, /*populate=*/false);
  const Clock::duration taken = Clock::now() - began;
  unmap_fresh(data, bytes);
  return taken;
}

}  // namespace

std::byte* map_fresh(uint64_t size) {
  void* const wide =
      ::mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (wide == MAP_FAILED) return nullptr;
  auto* const start = static_cast<std::byte*>(wide);
  auto* const data =
      start + (align_up(reinterpret_cast<uintptr_t>(start), kHugePage) - reinterpret_cast<uintptr_t>(start));
  if (data > start) ::munmap(start, static_cast<size_t>(data - start));
  if (const auto tail = static_cast<size_t>(start + kHugePage - data); tail > 0) ::munmap(data + size, tail);
  ::madvise(data, size, MADV_DONTDUMP);  // keep prompts out of core files
  return data;
}

void unmap_fresh(std::byte* data, uint64_t size) {
  if (size > 0) ::munmap(data, size);
}

void prefer_huge_pages(std::byte* data, uint64_t size, bool huge) {
  ::madvise(data, size, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);  // a hint only
}

void populate(std::byte* data, uint64_t size) {
  const uint64_t skipped = align_up(reinterpret_cast<uintptr_t>(data), kPage) - reinterpret_cast<uintptr_t>(data);
  if (size >= skipped + kPage) ::madvise(data + skipped, (size - skipped) / kPage * kPage, MADV_POPULATE_WRITE);
}

void touch(std::byte* data, uint64_t size, bool populate) {
  if (populate && ::madvise(data, size, MADV_POPULATE_WRITE) == 0) return;
  for (uint64_t at = 0; at < size; at += kPage) *reinterpret_cast<volatile std::byte*>(data + at) = std::byte{0};
}

void prefault(std::byte* data, uint64_t size, const PrefaultMethod& method, const TouchPages& touch) {
  prefer_huge_pages(data, size, method.huge_pages);
  const auto run = [&](uint64_t from, uint64_t to) { touch(data + from, to - from, method.populate); };
  const uint64_t share = align_up(size / static_cast<uint64_t>(method.threads) + 1, kHugePage);
  std::vector<std::thread> workers;
  uint64_t from = std::min(size, share);
  try {
    for (; from < size; from += share) workers.emplace_back(run, from, std::min(size, from + share));
  } catch (const std::exception&) {
    run(from, size);  // no thread
  }
  run(0, std::min(size, share));
  for (std::thread& worker : workers) worker.join();
}

std::string to_string(const PrefaultMethod& method) {
  return fmt::format("{} pages, {}, {} thread{}", method.huge_pages ? "huge" : "small",
                     method.populate ? "populated" : "touched", method.threads, method.threads == 1 ? "" : "s");
}

PrefaultMethod fastest_prefault(int threads) {
  PrefaultMethod best{.threads = threads};
  double best_seconds = std::numeric_limits<double>::infinity();
  for (int trial = 0; trial < kTrials; ++trial) {
    for (const bool huge_pages : {true, false}) {
      for (const bool populate : {true, false}) {
        const PrefaultMethod method{huge_pages, populate, threads};
        std::byte* const data = map_fresh(kTrialBytes);
        if (data == nullptr) return best;
        const auto began = std::chrono::steady_clock::now();
        prefault(data, kTrialBytes, method);
        const double taken = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
        unmap_fresh(data, kTrialBytes);
        if (taken < best_seconds) best = method, best_seconds = taken;
      }
    }
  }
  return best;
}

HugePages huge_pages_while_fast() {
  struct Answer {
    Mutex mutex;
    std::optional<Clock::time_point> asked TORPOR_GUARDED_BY(mutex);
    bool fast TORPOR_GUARDED_BY(mutex) = true;
  };
  return [answer = std::make_shared<Answer>()] {
    const MutexLock lock(answer->mutex);  // who comes meanwhile waits for the same answer
    if (answer->asked && Clock::now() - *answer->asked < kProbeHolds) return answer->fast;
    const std::optional<Clock::duration> huge = first_use(kProbeBytes, true);
    const std::optional<Clock::duration> small = first_use(kProbeBytes, false);
    answer->fast = !huge || !small || *huge <= *small;
    answer->asked = Clock::now();
    return answer->fast;
  };
}

}  // namespace torpor
