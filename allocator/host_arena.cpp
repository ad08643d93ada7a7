#include "allocator/host_arena.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <limits>
#include <system_error>
#include <thread>

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <fmt/format.h>

#include "allocator/device_memory.h"
#include "base/log.h"
#include "base/units.h"

namespace torpor {
namespace {

constexpr uint64_t kTrialBytes = 32 * kMiB;
constexpr int kTrials = 2;  // of each way; the first may meet memory that a hypervisor has not backed yet

// Fresh memory at a multiple of a huge page; null when the system has none.
std::byte* map_fresh(uint64_t size) {
  void* const wide =
      ::mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (wide == MAP_FAILED) return nullptr;
  auto* const start = static_cast<std::byte*>(wide);
  auto* const data =
      start + (align_up(reinterpret_cast<uintptr_t>(start), kHugePage) - reinterpret_cast<uintptr_t>(start));
  if (data > start) ::munmap(start, static_cast<size_t>(data - start));
  if (const auto tail = static_cast<size_t>(start + kHugePage - data); tail > 0) ::munmap(data + size, tail);
  ::madvise(data, size, MADV_DONTDUMP);  // prompts have no place in core files
  return data;
}

// Asks that pages of untouched memory come from a NUMA node, from others when it is full. Returns 0 or the system's
// error.
int prefer_node(std::byte* data, uint64_t size, int node) {
  constexpr int kNodes = 1024;  // Linux's most
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  unsigned long mask[kNodes / kBits] = {};
  if (node >= kNodes) return EINVAL;
  mask[static_cast<size_t>(node) / kBits] = 1ul << (static_cast<size_t>(node) % kBits);
  return ::syscall(SYS_mbind, data, size, MPOL_PREFERRED, mask, kNodes + 1, 0) == 0
             ? 0
             : errno;  // it takes one bit less than it is told
}

// Makes every page present, so that later use pays no page fault. Several threads, because faults of one process scale.
void bring_up(std::byte* data, uint64_t size, const BringUp& method) {
  ::madvise(data, size, method.huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);  // advice only
  const auto run = [data, &method](uint64_t from, uint64_t to) {
    if (method.populate && ::madvise(data + from, to - from, MADV_POPULATE_WRITE) == 0) return;
    for (uint64_t at = from; at < to; at += kPage) *reinterpret_cast<volatile std::byte*>(data + at) = std::byte{0};
  };
  const uint64_t share = align_up(size / static_cast<uint64_t>(method.threads) + 1, kHugePage);
  std::vector<std::thread> workers;
  uint64_t from = std::min(size, share);
  try {
    for (; from < size; from += share) workers.emplace_back(run, from, std::min(size, from + share));
  } catch (const std::exception&) {
    run(from, size);  // no thread to be had
  }
  run(0, std::min(size, share));
  for (std::thread& worker : workers) worker.join();
}

}  // namespace

std::string to_string(const BringUp& method) {
  return fmt::format("{} pages, {}, {} thread{}", method.huge_pages ? "huge" : "small",
                     method.populate ? "populated" : "touched", method.threads, method.threads == 1 ? "" : "s");
}

BringUp fastest_bring_up(int threads) {
  BringUp best{.threads = threads};
  double best_seconds = std::numeric_limits<double>::infinity();
  for (int trial = 0; trial < kTrials; ++trial) {
    for (const bool huge_pages : {true, false}) {
      for (const bool populate : {true, false}) {
        const BringUp method{huge_pages, populate, threads};
        std::byte* const data = map_fresh(kTrialBytes);
        if (data == nullptr) return best;
        const auto began = std::chrono::steady_clock::now();
        bring_up(data, kTrialBytes, method);
        const double taken = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
        ::munmap(data, kTrialBytes);
        if (taken < best_seconds) best = method, best_seconds = taken;
      }
    }
  }
  return best;
}

struct HostArena::Impl {
  struct Slab {
    uint64_t size = 0;
    std::map<uint64_t, uint64_t> free;  // offset -> length; neighbours are joined
    bool pinned = false;
    bool stuck = false;  // a part of it is pinned: never given back
  };
  HostArenaOptions options;
  mutable std::mutex mutex;  // guards all below
  std::map<std::byte*, Slab> slabs;
  uint64_t held = 0;
  uint64_t used = 0;
  uint64_t unpinned = 0;
  BringUp method;
  std::optional<int> numa_node;
  bool ending = false;
  std::thread background;
  Status background_result;

  // Precondition: the lock is held.
  Status grow(uint64_t bytes) {
    uint64_t size = align_up(std::max(bytes, options.slab_bytes), options.slab_bytes >= kHugePage ? kHugePage : kPage);
    if (options.budget_bytes != 0 && held + size > options.budget_bytes) size = align_up(bytes, kPage);
    if (options.budget_bytes != 0 && held + size > options.budget_bytes) {
      return Error{
          .code = Code::kResourceExhausted,
          .what = fmt::format("host memory for saved bytes: {} more wanted, {} of the budget of {} are held, {} in use",
                              bytes, held, options.budget_bytes, used),
          .next_step = "raise arena_budget_bytes, or sleep to disk"};
    }
    std::byte* const data = map_fresh(size);
    if (data == nullptr)
      return system_error(errno, fmt::format("cannot take {} bytes of host memory", size),
                          "free memory, or sleep to disk");
    if (const int failed = numa_node ? prefer_node(data, size, *numa_node) : 0; failed != 0) {
      log().warn("host memory comes from any NUMA node, copies may be slower: node {} refused: {}", *numa_node,
                 std::generic_category().message(failed));
      numa_node.reset();
    }
    torpor::bring_up(data, size, method);
    Slab slab{.size = size, .free = {{0, size}}};
    if (options.pin_for != nullptr) {
      const Status pinned = options.pin_for->pin_host({data, size});
      slab.pinned = pinned.has_value();
      if (!pinned) {
        log().warn("host memory is used unpinned, copies are slower: {}", pinned.error().to_string());
        unpinned += size;
        slab.stuck = pinned.error().state_changed;
      }
    }
    held += size;
    slabs.emplace(data, std::move(slab));
    return ok();
  }

  // Gives a slab without a live span back. False: it must stay, for the device may still know it. The lock is held.
  bool drop(std::byte* data, Slab& slab) {
    if (slab.stuck) return false;
    if (slab.pinned) {
      if (const Status unpinned_now = options.pin_for->unpin_host({data, slab.size}); !unpinned_now) {
        log().error("host memory stays: {}", unpinned_now.error().to_string());
        return false;
      }
    } else if (options.pin_for != nullptr) {
      unpinned -= slab.size;
    }
    ::munmap(data, slab.size);
    held -= slab.size;
    return true;
  }

  // The smallest free range that fits. Precondition: the lock is held.
  std::byte* take(uint64_t bytes) {
    Slab* best_slab = nullptr;
    std::byte* best_base = nullptr;
    std::map<uint64_t, uint64_t>::iterator best;
    for (auto& [base, slab] : slabs) {
      for (auto range = slab.free.begin(); range != slab.free.end(); ++range) {
        if (range->second >= bytes && (best_slab == nullptr || range->second < best->second)) {
          best_slab = &slab;
          best_base = base;
          best = range;
        }
      }
    }
    if (best_slab == nullptr) return nullptr;
    const auto [offset, length] = *best;
    best_slab->free.erase(best);
    if (length > bytes) best_slab->free.emplace(offset + bytes, length - bytes);
    return best_base + offset;
  }
};

HostArena::HostArena(HostArenaOptions options) : impl_(std::make_unique<Impl>()) { impl_->options = options; }

HostArena::~HostArena() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->ending = true;
  }
  if (impl_->background.joinable()) impl_->background.join();
  for (auto& [base, slab] : impl_->slabs) (void)impl_->drop(base, slab);
}

Result<std::unique_ptr<HostArena>> HostArena::create(HostArenaOptions options) {
  if (options.prefault_threads < 0) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("prefault_threads is {}", options.prefault_threads),
                 .next_step = "use 0 for the machine's own number"};
  }
  if (options.prefault_threads == 0) {
    options.prefault_threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 8u));
  }
  std::unique_ptr<HostArena> arena(new HostArena(options));
  arena->impl_->method.threads = options.prefault_threads;
  if (options.pin_for != nullptr) arena->impl_->numa_node = options.pin_for->host_numa_node();
  return arena;
}

Result<HostArena::Span> HostArena::allocate(uint64_t bytes) {
  Span span;
  if (bytes == 0) return span;
  const uint64_t size = align_up(bytes, kPage);
  const std::lock_guard lock(impl_->mutex);
  std::byte* data = impl_->take(size);
  if (data == nullptr) {
    TORPOR_TRY(impl_->grow(size));
    data = impl_->take(size);
  }
  impl_->used += size;
  span.arena_ = this;
  span.data_ = data;
  span.size_ = bytes;
  return span;
}

Status HostArena::prefault(uint64_t bytes) {
  const std::lock_guard lock(impl_->mutex);
  const uint64_t free = impl_->held - impl_->used;
  return free >= bytes ? ok() : impl_->grow(align_up(bytes - free, kPage));
}

Status HostArena::grow_to(uint64_t bytes) {
  while (true) {
    const std::lock_guard lock(impl_->mutex);
    const uint64_t free = impl_->held - impl_->used;
    if (impl_->ending || free >= bytes) return ok();
    TORPOR_TRY(impl_->grow(std::min(align_up(bytes - free, kPage), std::max(impl_->options.slab_bytes, kPage))));
  }
}

void HostArena::prefault_in_background(uint64_t bytes) {
  if (impl_->background.joinable()) impl_->background.join();
  const auto work = [this, bytes] {
    const Status done = catching_no_memory([&]() -> Status {
      const BringUp method = fastest_bring_up(impl_->options.prefault_threads);
      {
        const std::lock_guard lock(impl_->mutex);
        impl_->method = method;
      }
      return grow_to(bytes);
    });
    const std::lock_guard lock(impl_->mutex);
    impl_->background_result = done;
  };
  try {
    impl_->background = std::thread(work);
  } catch (const std::exception&) {
    work();
  }
}

Status HostArena::wait_prefault() {
  if (impl_->background.joinable()) impl_->background.join();
  const std::lock_guard lock(impl_->mutex);
  return impl_->background_result;
}

// Precondition: the lock is held.
void HostArena::give_back(std::byte* data, uint64_t size) {
  auto slab = impl_->slabs.upper_bound(data);
  --slab;
  std::map<uint64_t, uint64_t>& free = slab->second.free;
  auto range = free.emplace(static_cast<uint64_t>(data - slab->first), size).first;
  if (const auto next = std::next(range); next != free.end() && range->first + range->second == next->first) {
    range->second += next->second;
    free.erase(next);
  }
  if (range != free.begin()) {
    if (const auto previous = std::prev(range); previous->first + previous->second == range->first) {
      previous->second += range->second;
      free.erase(range);
    }
  }
  impl_->used -= size;
}

uint64_t HostArena::trim(uint64_t keep_bytes) {
  const std::lock_guard lock(impl_->mutex);
  uint64_t given = 0;
  for (auto slab = impl_->slabs.begin(); slab != impl_->slabs.end();) {
    const auto& free = slab->second.free;
    const bool unused = impl_->held > keep_bytes && free.size() == 1 && free.begin()->second == slab->second.size;
    if (const uint64_t size = slab->second.size; unused && impl_->drop(slab->first, slab->second)) {
      given += size;
      slab = impl_->slabs.erase(slab);
    } else {
      ++slab;
    }
  }
  return given;
}

HostArenaInfo HostArena::info() const {
  const std::lock_guard lock(impl_->mutex);
  return {.budget_bytes = impl_->options.budget_bytes,
          .held_bytes = impl_->held,
          .used_bytes = impl_->used,
          .unpinned_bytes = impl_->unpinned,
          .numa_node = impl_->numa_node,
          .bring_up = impl_->method};
}

HostArena::Span::~Span() {
  if (arena_ == nullptr) return;
  const std::lock_guard lock(arena_->impl_->mutex);
  arena_->give_back(data_, align_up(size_, kPage));
}

HostArena::Span::Span(Span&& other) noexcept
    : arena_(std::exchange(other.arena_, nullptr)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

HostArena::Span& HostArena::Span::operator=(Span&& other) noexcept {
  std::swap(arena_, other.arena_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace torpor
