#include "allocator/host_arena.h"

#include <algorithm>
#include <cerrno>
#include <thread>

#include <sys/mman.h>

#include <fmt/format.h>

#include "base/units.h"

namespace torpor {
namespace {

constexpr uint64_t kHugePage = 2 * kMiB;

// Touches every page so that later use pays no page fault. Several threads, because faults of one process scale.
void touch(std::byte* data, uint64_t size, int threads) {
  const auto run = [data](uint64_t from, uint64_t to) {
    for (uint64_t at = from; at < to; at += kPage) *reinterpret_cast<volatile std::byte*>(data + at) = std::byte{0};
  };
  const uint64_t share = align_up(size / static_cast<uint64_t>(threads) + 1, kHugePage);
  std::vector<std::thread> workers;
  for (uint64_t from = share; from < size; from += share) workers.emplace_back(run, from, std::min(size, from + share));
  run(0, std::min(size, share));
  for (std::thread& worker : workers) worker.join();
}

}  // namespace

struct HostArena::Impl {
  struct Slab {
    uint64_t size = 0;
    std::map<uint64_t, uint64_t> free;  // offset -> length; neighbours are joined
  };
  HostArenaOptions options;
  mutable std::mutex mutex;  // guards all below
  std::map<std::byte*, Slab> slabs;
  uint64_t held = 0;
  uint64_t used = 0;

  // Precondition: the lock is held.
  Status grow(uint64_t bytes) {
    uint64_t size = align_up(std::max(bytes, options.slab_bytes), kHugePage);
    if (options.budget_bytes != 0 && held + size > options.budget_bytes) size = align_up(bytes, kPage);
    if (options.budget_bytes != 0 && held + size > options.budget_bytes) {
      return Error{.code = Code::kResourceExhausted,
                   .what = fmt::format("host memory for saved bytes: {} more wanted, {} of the budget of {} are held, {} in use",
                                       bytes, held, options.budget_bytes, used),
                   .next_step = "raise arena_budget_bytes, or sleep to disk"};
    }
    void* data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      return system_error(errno, fmt::format("cannot take {} bytes of host memory", size), "free memory, or sleep to disk");
    }
    ::madvise(data, size, MADV_HUGEPAGE);   // advice only
    ::madvise(data, size, MADV_DONTDUMP);
    touch(static_cast<std::byte*>(data), size, options.prefault_threads);
    held += size;
    slabs.emplace(static_cast<std::byte*>(data), Slab{.size = size, .free = {{0, size}}});
    return ok();
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
  for (const auto& [base, slab] : impl_->slabs) ::munmap(base, slab.size);
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
  return std::unique_ptr<HostArena>(new HostArena(options));
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

uint64_t HostArena::trim() {
  const std::lock_guard lock(impl_->mutex);
  uint64_t given = 0;
  for (auto slab = impl_->slabs.begin(); slab != impl_->slabs.end();) {
    const auto& free = slab->second.free;
    if (free.size() == 1 && free.begin()->second == slab->second.size) {
      ::munmap(slab->first, slab->second.size);
      given += slab->second.size;
      slab = impl_->slabs.erase(slab);
    } else {
      ++slab;
    }
  }
  impl_->held -= given;
  return given;
}

HostArenaInfo HostArena::info() const {
  const std::lock_guard lock(impl_->mutex);
  return {.budget_bytes = impl_->options.budget_bytes, .held_bytes = impl_->held, .used_bytes = impl_->used};
}

HostArena::Span::~Span() {
  if (arena_ == nullptr) return;
  const std::lock_guard lock(arena_->impl_->mutex);
  arena_->give_back(data_, align_up(size_, kPage));
}

HostArena::Span::Span(Span&& other) noexcept
    : arena_(std::exchange(other.arena_, nullptr)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

HostArena::Span& HostArena::Span::operator=(Span&& other) noexcept {
  std::swap(arena_, other.arena_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace torpor
