#include "allocator/host_arena.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <limits>
#include <system_error>
#include <thread>

#include <fmt/core.h>

#include "allocator/device_memory.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/units.h"

namespace torpor {
namespace {

constexpr uint64_t kFirstSlab = 8 * kMiB;

}  // namespace

struct HostArena::Impl {
  struct Slab {
    uint64_t size = 0;
    std::map<uint64_t, uint64_t> free;  // offset -> length; neighbours are joined
    bool pinned = false;
    bool stuck = false;  // a part of it is pinned: never given back
    bool unused() const { return free.size() == 1 && free.begin()->second == size; }
  };
  using Slabs = std::map<std::byte*, Slab>;

  HostArenaOptions options;
  mutable Mutex mutex;  // not held while memory is taken, touched, pinned, unpinned or given back
  CondVar changed;      // memory came, came back, or went
  Slabs slabs TORPOR_GUARDED_BY(mutex);
  uint64_t held TORPOR_GUARDED_BY(mutex) = 0;  // of slabs, and of those on their way
  uint64_t used TORPOR_GUARDED_BY(mutex) = 0;
  uint64_t unpinned TORPOR_GUARDED_BY(mutex) = 0;
  BringUp method TORPOR_GUARDED_BY(mutex);
  std::optional<int> numa_node TORPOR_GUARDED_BY(mutex);
  uint64_t growing TORPOR_GUARDED_BY(mutex) = 0;   // bytes that are being brought up; one slab at a time
  uint64_t dropping TORPOR_GUARDED_BY(mutex) = 0;  // bytes that are being given back
  bool ending TORPOR_GUARDED_BY(mutex) = false;
  bool prefaulting TORPOR_GUARDED_BY(mutex) = false;
  std::thread background TORPOR_GUARDED_BY(mutex);  // joined by the next one, or the end
  Status background_result TORPOR_GUARDED_BY(mutex);
  GiveUp give_up TORPOR_GUARDED_BY(mutex);
  uint64_t coming TORPOR_GUARDED_BY(mutex) = 0;  // bytes that are brought up slowly, beside all that
  std::atomic<bool> hurry = false;               // somebody needs fresh memory now

  // Memory that nobody has, and that is not on its way.
  uint64_t free_bytes() const TORPOR_REQUIRES(mutex) { return held - used - growing - dropping - coming; }

  // Takes another slab from the system, of at least `bytes`. Waits for a slab that is on its way instead: the caller
  // looks again then. Gives the lock back meanwhile.
  Status grow(uint64_t bytes) TORPOR_REQUIRES(mutex) {
    if (growing > 0) {
      changed.wait(mutex);
      return ok();
    }
    const uint64_t usual = std::max(bytes, options.slab_bytes);
    // The first slabs are small: who wants staging memory, and no more, waits for that alone to be touched.
    const uint64_t least = std::min(usual, std::max({bytes, held, kFirstSlab}));
    uint64_t size = align_up(least, options.slab_bytes >= kHugePage ? kHugePage : kPage);
    // Near the budget what is asked for alone, so that no rest of a slab is missing in the end.
    if (options.budget_bytes != 0 && held + usual > options.budget_bytes) size = align_up(bytes, kPage);
    if (options.budget_bytes != 0 && held + size > options.budget_bytes) {
      if (dropping > 0 || coming > 0) {  // some of it goes, or comes
        hurry = true;
        changed.wait(mutex);
        return ok();
      }
      return Error{
          .code = Code::kResourceExhausted,
          .what = fmt::format("host memory for saved bytes: {} more wanted, {} of the budget of {} are held, {} in use",
                              bytes, held, options.budget_bytes, used),
          .next_step = "raise arena_budget_bytes, or sleep to disk"};
    }
    Slabs fresh;
    Slab& slab = fresh.emplace(nullptr, Slab{.size = size, .free = {{0, size}}}).first->second;
    const BringUp how = method;
    std::optional<int> node = numa_node;
    growing = size;
    held += size;
    hurry = true;
    mutex.unlock();
    std::byte* data = nullptr;
    const Status taken = catching([&] { return take_slab(slab, how, node, data); });
    mutex.lock();
    growing = 0;
    if (taken) {
      auto entry = fresh.extract(fresh.begin());
      entry.key() = data;
      if (options.pin_for != nullptr && !slab.pinned) unpinned += size;
      numa_node = node;
      slabs.insert(std::move(entry));
    } else {
      held -= size;
    }
    changed.notify_all();
    return taken;
  }

  // Without the lock. After a failure nothing is taken.
  Status take_slab(Slab& slab, const BringUp& how, std::optional<int>& node, std::byte*& data) const {
    TORPOR_ASSIGN(data, map_slab(slab.size, node));
    torpor::bring_up(data, slab.size, how);
    return pin(slab, data);
  }
  static Result<std::byte*> map_slab(uint64_t size, std::optional<int>& node) {
    std::byte* const data = map_fresh(size);
    if (data == nullptr)
      return system_error(errno, fmt::format("cannot take {} bytes of host memory", size),
                          "free memory, or sleep to disk");
    if (const int failed = node ? prefer_node(data, size, *node) : 0; failed != 0) {
      log().warn("host memory comes from any NUMA node, copies may be slower: node {} refused: {}", *node,
                 std::generic_category().message(failed));
      node.reset();
    }
    return data;
  }
  Status pin(Slab& slab, std::byte* data) const {
    if (options.pin_for == nullptr) return ok();
    const Status pinned = catching([&] { return options.pin_for->pin_host({data, slab.size}); });
    slab.pinned = pinned.has_value();
    if (pinned) return ok();
    slab.stuck = pinned.error().state_changed;
    log().warn("host memory is used unpinned, copies are slower: {}", pinned.error().to_string());
    return ok();
  }

  // As HostArena::prefault_slowly(). Gives the lock back meanwhile.
  Result<uint64_t> grow_slowly(uint64_t bytes, const GoOn& go_on) TORPOR_REQUIRES(mutex) {
    while (growing > 0) changed.wait(mutex);
    if (free_bytes() >= bytes) return 0;
    const uint64_t size = align_up(std::min(bytes - free_bytes(), options.slab_bytes), kPage);
    if (options.budget_bytes != 0 && held + size > options.budget_bytes) return 0;
    Slabs fresh;
    Slab& slab = fresh.emplace(nullptr, Slab{.size = 0, .free = {{0, 0}}}).first->second;
    std::optional<int> node = numa_node;
    if (coming == 0) hurry = false;
    coming += size;
    held += size;
    mutex.unlock();
    std::byte* data = nullptr;
    const Status taken = catching([&]() -> Status {
      TORPOR_ASSIGN(data, map_slab(size, node));
      prefer_huge_pages(data, size, true);
      for (uint64_t piece = 0; slab.size < size; slab.size += piece) {
        piece = std::min(kHugePage, size - slab.size);
        if (!go_on(piece) || hurry) break;
        touch(data + slab.size, piece, /*populate=*/true);
      }
      return ok();
    });
    slab.free.begin()->second = slab.size;
    if (data != nullptr) unmap_fresh(data + slab.size, size - slab.size);
    if (slab.size > 0) (void)catching([&] { return pin(slab, data); });
    mutex.lock();
    coming -= size;
    held -= size - slab.size;
    numa_node = node;
    const uint64_t came = slab.size;
    if (came > 0) {
      auto entry = fresh.extract(fresh.begin());
      entry.key() = data;
      if (options.pin_for != nullptr && !slab.pinned) unpinned += came;
      slabs.insert(std::move(entry));
    }
    changed.notify_all();
    if (!taken) return taken.error();
    return came;
  }

  // Gives a slab without a live span back to the system, without the lock. False: it must stay, for the device may
  // still know it.
  bool drop(std::byte* data, const Slab& slab) const {
    if (slab.stuck) return false;
    if (slab.pinned) {
      const Status done = catching([&] { return options.pin_for->unpin_host({data, slab.size}); });
      if (!done) {
        log().error("host memory stays: {}", done.error().to_string());
        return false;
      }
    }
    unmap_fresh(data, slab.size);
    return true;
  }

  // The smallest free range that fits; null: there is none. `range`, of any content, becomes the span's own.
  std::byte* take(uint64_t bytes, FreeRange& range) TORPOR_REQUIRES(mutex) {
    Slab* best_slab = nullptr;
    std::byte* best_base = nullptr;
    std::map<uint64_t, uint64_t>::iterator best;
    for (auto& [base, slab] : slabs) {
      for (auto free = slab.free.begin(); free != slab.free.end(); ++free) {
        if (free->second >= bytes && (best_slab == nullptr || free->second < best->second)) {
          best_slab = &slab;
          best_base = base;
          best = free;
        }
      }
    }
    if (best_slab == nullptr) return nullptr;
    const auto [offset, length] = *best;
    if (length > bytes) {
      range.key() = offset + bytes;
      range.mapped() = length - bytes;
      best_slab->free.insert(std::move(range));
    }
    range = best_slab->free.extract(best);
    return best_base + offset;
  }

  void lend(Span& span, HostArena& arena, std::byte* data, uint64_t bytes, FreeRange range) TORPOR_REQUIRES(mutex) {
    used += align_up(bytes, kPage);
    span.arena_ = &arena;
    span.data_ = data;
    span.size_ = bytes;
    span.range_ = std::move(range);
  }

  void give_back(std::byte* data, uint64_t size, FreeRange own) TORPOR_REQUIRES(mutex) {
    auto slab = slabs.upper_bound(data);
    --slab;
    std::map<uint64_t, uint64_t>& free = slab->second.free;
    own.key() = static_cast<uint64_t>(data - slab->first);
    own.mapped() = size;
    auto range = free.insert(std::move(own)).position;
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
    used -= size;
    changed.notify_all();
  }

  Status grow_to(uint64_t bytes, uint64_t most_at_once) {
    const MutexLock lock(mutex);
    while (!ending && free_bytes() < bytes) {
      const uint64_t missing = align_up(bytes - free_bytes(), kPage);
      const Status grown = grow(std::min(missing, most_at_once));
      if (!grown && (grown.error().code != Code::kResourceExhausted || !ask_for(missing))) return grown;
    }
    return ok();
  }

  // Whether somebody gave up a span. Gives the lock back meanwhile.
  bool ask_for(uint64_t bytes) TORPOR_REQUIRES(mutex) {
    if (!give_up) return false;
    const GiveUp ask = give_up;
    mutex.unlock();
    const uint64_t given = ask(bytes);
    mutex.lock();
    return given > 0;
  }

  // As HostArena::trim(). Gives the lock back meanwhile.
  uint64_t trim(uint64_t keep_bytes) TORPOR_REQUIRES(mutex) {
    uint64_t given = 0;
    Slabs stay;  // those that could not be given back
    while (true) {
      auto slab = slabs.begin();
      while (slab != slabs.end() && (slab->second.stuck || !slab->second.unused())) ++slab;
      if (slab == slabs.end() || held - growing - dropping - coming <= keep_bytes) break;
      // Out of reach of everybody else while it is given back.
      auto entry = slabs.extract(slab);
      const uint64_t size = entry.mapped().size;
      dropping += size;
      mutex.unlock();
      const bool gone = drop(entry.key(), entry.mapped());
      mutex.lock();
      dropping -= size;
      if (gone) {
        held -= size;
        given += size;
        if (options.pin_for != nullptr && !entry.mapped().pinned) unpinned -= size;
      } else {
        stay.insert(std::move(entry));
      }
      changed.notify_all();
    }
    slabs.merge(stay);
    return given;
  }
};

HostArena::HostArena(HostArenaOptions options) : impl_(std::make_unique<Impl>()) { impl_->options = options; }

HostArena::~HostArena() {
  {
    const MutexLock lock(impl_->mutex);
    impl_->ending = true;
  }
  if (impl_->background.joinable()) impl_->background.join();
  for (const auto& [base, slab] : impl_->slabs) (void)impl_->drop(base, slab);
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
  const MutexLock lock(arena->impl_->mutex);
  arena->impl_->method.threads = options.prefault_threads;
  if (options.pin_for != nullptr) arena->impl_->numa_node = options.pin_for->host_numa_node();
  return arena;
}

Result<HostArena::Span> HostArena::allocate(uint64_t bytes) {
  Span span;
  if (bytes == 0) return span;
  const uint64_t size = align_up(bytes, kPage);
  std::map<uint64_t, uint64_t> made{{0, 0}};
  FreeRange range = made.extract(made.begin());
  Impl& impl = *impl_;
  const MutexLock lock(impl.mutex);
  std::byte* data = nullptr;
  while ((data = impl.take(size, range)) == nullptr) {
    const Status grown = impl.grow(size);
    if (grown) continue;
    if (grown.error().code != Code::kResourceExhausted) return grown.error();
    if (!impl.ask_for(size) && impl.trim(0) == 0) return grown.error();
  }
  impl.lend(span, *this, data, bytes, std::move(range));
  return span;
}

HostArena::Span HostArena::allocate_held(uint64_t bytes) {
  const uint64_t size = align_up(bytes, kPage);
  std::map<uint64_t, uint64_t> made{{0, 0}};
  FreeRange range = made.extract(made.begin());
  Span span;
  const MutexLock lock(impl_->mutex);
  std::byte* const data = bytes == 0 ? nullptr : impl_->take(size, range);
  if (data != nullptr) impl_->lend(span, *this, data, bytes, std::move(range));
  return span;
}

Status HostArena::prefault(uint64_t bytes) { return impl_->grow_to(bytes, std::numeric_limits<uint64_t>::max()); }

void HostArena::prefault_in_background(uint64_t bytes) {
  Impl& impl = *impl_;
  const auto work = [&impl, bytes] {
    const Status done = catching([&]() -> Status {
      const BringUp method = fastest_bring_up(impl.options.prefault_threads);
      {
        const MutexLock lock(impl.mutex);
        impl.method = method;
      }
      return impl.grow_to(bytes, std::max(impl.options.slab_bytes, kPage));
    });
    const MutexLock lock(impl.mutex);
    impl.background_result = done;
    impl.prefaulting = false;
    impl.changed.notify_all();
  };
  {
    const MutexLock lock(impl.mutex);
    while (impl.prefaulting) impl.changed.wait(impl.mutex);
    impl.prefaulting = true;
    if (impl.background.joinable()) impl.background.join();  // its work is done
    try {
      impl.background = std::thread(work);
      return;
    } catch (const std::exception& error) {
      log().warn("host memory is brought up without a thread of its own: {}", error.what());
    }
  }
  work();
}

Status HostArena::wait_prefault() {
  const MutexLock lock(impl_->mutex);
  while (impl_->prefaulting) impl_->changed.wait(impl_->mutex);
  return impl_->background_result;
}

Result<uint64_t> HostArena::prefault_slowly(uint64_t bytes, const GoOn& go_on) {
  return catching([&]() -> Result<uint64_t> {
    const MutexLock lock(impl_->mutex);
    return impl_->grow_slowly(bytes, go_on);
  });
}

uint64_t HostArena::trim(uint64_t keep_bytes) {
  const MutexLock lock(impl_->mutex);
  return impl_->trim(keep_bytes);
}

void HostArena::ask_when_short(GiveUp give_up) {
  const MutexLock lock(impl_->mutex);
  impl_->give_up.swap(give_up);
}

HostArenaInfo HostArena::info() const {
  const MutexLock lock(impl_->mutex);
  return {.budget_bytes = impl_->options.budget_bytes,
          .held_bytes = impl_->held - impl_->growing - impl_->coming,
          .used_bytes = impl_->used,
          .unpinned_bytes = impl_->unpinned,
          .numa_node = impl_->numa_node,
          .bring_up = impl_->method};
}

HostArena::Span::~Span() {
  if (arena_ == nullptr) return;
  const MutexLock lock(arena_->impl_->mutex);
  arena_->impl_->give_back(data_, align_up(size_, kPage), std::move(range_));
}

HostArena::Span::Span(Span&& other) noexcept
    : arena_(std::exchange(other.arena_, nullptr)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      range_(std::move(other.range_)) {}

HostArena::Span& HostArena::Span::operator=(Span&& other) noexcept {
  std::swap(arena_, other.arena_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(range_, other.range_);
  return *this;
}

}  // namespace torpor
