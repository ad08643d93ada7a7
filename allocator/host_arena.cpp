// SPDX-License-Identifier: Apache-2.0
#include "allocator/host_arena.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <thread>

#include <fmt/core.h>

#include "allocator/arena_slab.h"
#include "allocator/device_memory.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/units.h"

namespace torpor {
namespace {

constexpr uint64_t kFirstSlab = 8 * kMiB;
// Most bytes to pin at once beside work that must not notice: other calls of the driver wait about a millisecond.
constexpr uint64_t kQuietPin = 8 * kMiB;
constexpr uint64_t kSleepers = 16;  // most ranks of one machine that are expected to fall asleep at once

}  // namespace

struct HostArena::Impl {
  using Range = ArenaRanges::Range;
  using Slabs = std::map<std::byte*, ArenaSlab>;

  HostArenaOptions options;  // but for the budget
  mutable Mutex mutex;       // not held while memory is taken, touched, pinned, unpinned or given back
  CondVar changed;           // memory was added, returned or given back to the system
  Slabs slabs TORPOR_GUARDED_BY(mutex);
  ArenaRanges ranges TORPOR_GUARDED_BY(mutex);  // of the slabs
  uint64_t budget TORPOR_GUARDED_BY(mutex) = 0;
  uint64_t held TORPOR_GUARDED_BY(mutex) = 0;  // of slabs, and of memory that is being prefaulted
  uint64_t used TORPOR_GUARDED_BY(mutex) = 0;
  uint64_t unpinned TORPOR_GUARDED_BY(mutex) = 0;
  uint64_t pin_later TORPOR_GUARDED_BY(mutex) = 0;  // slabs that wait for another try to pin them
  PrefaultMethod method TORPOR_GUARDED_BY(mutex);
  NumaTarget numa TORPOR_GUARDED_BY(mutex);
  uint64_t growing TORPOR_GUARDED_BY(mutex) = 0;   // bytes that grow() prefaults; one slab at a time
  uint64_t dropping TORPOR_GUARDED_BY(mutex) = 0;  // bytes that are being given back, or pinned again
  bool ending TORPOR_GUARDED_BY(mutex) = false;
  bool prefaulting TORPOR_GUARDED_BY(mutex) = false;
  std::thread background TORPOR_GUARDED_BY(mutex);  // joined by the next one, or by the destructor
  Status background_result TORPOR_GUARDED_BY(mutex);
  Reclaim reclaim TORPOR_GUARDED_BY(mutex);
  uint64_t coming TORPOR_GUARDED_BY(mutex) = 0;  // bytes that grow_slowly() prefaults, in addition
  std::atomic<bool> hurry = false;               // another call needs new memory now

  bool wants_huge_pages() const { return !options.huge_pages || options.huge_pages(); }  // no lock is held

  // Return the bytes that are there and unused.
  uint64_t free_bytes() const TORPOR_REQUIRES(mutex) { return held - used - growing - dropping - coming; }
  uint64_t missing(uint64_t bytes) const TORPOR_REQUIRES(mutex) {
    return bytes > free_bytes() ? align_up(bytes - free_bytes(), kPage) : 0;
  }
  bool over_budget(uint64_t more) const TORPOR_REQUIRES(mutex) { return budget != 0 && held + more > budget; }
  Error no_budget(uint64_t bytes) const TORPOR_REQUIRES(mutex) {
    return Error{
        .code = Code::kResourceExhausted,
        .what = fmt::format("host memory for saved bytes: {} more wanted, {} of the budget of {} are held, {} in use",
                            bytes, held, budget, used),
        .next_step = "raise arena_budget_bytes, or sleep to disk"};
  }

  // Return what the system can give; none if it is not known. Takes a fraction of a millisecond; no lock is held.
  std::optional<uint64_t> free_in_system() const noexcept {
    try {
      return options.free_memory ? options.free_memory() : std::nullopt;
    } catch (const std::exception&) {
      return std::nullopt;
    }
  }
  static Error no_memory(uint64_t bytes, uint64_t free) {
    return Error{.code = Code::kResourceExhausted,
                 .what = fmt::format("host memory for saved bytes: {} more wanted, {} are free on this machine or in "
                                     "its control group",
                                     bytes, free),
                 .next_step = "sleep to disk, keep less KV, or give the machine or container more memory"};
  }
  // Return the size of a slab for which the system has memory, `least` or more; best `usual`.
  Result<uint64_t> fitting(uint64_t usual, uint64_t least) const {
    const std::optional<uint64_t> free = free_in_system();
    if (!free || usual <= *free) return usual;
    if (least <= *free) return least;
    return no_memory(least, *free);
  }
  // Prefault a new slab, and unmap it if others take the system's memory meanwhile: other ranks may fall asleep at the
  // same time, and each has found enough for itself. Pieces become smaller with what is free, so that kSleepers of them
  // fit. No lock is held.
  Status touch_all(const ArenaSlab& slab, const PrefaultMethod& how, const TouchPages& touch) const {
    uint64_t piece = 0;
    for (uint64_t at = 0; at < slab.size; at += piece) {
      const std::optional<uint64_t> free = free_in_system();
      const uint64_t rest = slab.size - at;
      if (free && at > 0 && rest > *free) {
        unmap_fresh(slab.data, slab.size);
        return no_memory(rest, *free);
      }
      piece = std::min(rest, free ? std::max(*free / kSleepers / kHugePage * kHugePage, kHugePage) : rest);
      torpor::prefault(slab.data + at, piece, how, touch);
    }
    return ok();
  }
  // Do the work of HostArena::check_free(). What another call is adding counts as there. Releases the lock meanwhile.
  Status check_free(uint64_t bytes) TORPOR_REQUIRES(mutex) {
    while (dropping > 0) changed.wait(mutex);  // it is about to be free
    const uint64_t there = held - used;
    if (bytes <= there) return ok();
    mutex.unlock();
    const std::optional<uint64_t> free = free_in_system();
    mutex.lock();
    const uint64_t now_there = held - used;
    if (bytes <= now_there) return ok();
    const uint64_t wanted = align_up(bytes - now_there, kPage);
    return !free || wanted <= *free ? ok() : Status(no_memory(wanted, *free));
  }

  // Take another slab of at least `bytes` bytes from the system. If another slab is being prefaulted, wait for that
  // instead; the caller then looks again. Releases the lock meanwhile.
  Status grow(uint64_t bytes) TORPOR_REQUIRES(mutex) {
    if (growing > 0) {
      changed.wait(mutex);
      return ok();
    }
    const uint64_t usual = std::max(bytes, options.slab_bytes);
    // The first slabs are small: a caller that needs only staging memory waits for no more than that.
    const uint64_t least = std::min(usual, std::max({bytes, held, kFirstSlab}));
    uint64_t size = align_up(least, options.slab_bytes >= kHugePage ? kHugePage : kPage);
    // Near the budget take exactly what is asked for, so that no remainder of a slab is missing in the end.
    if (over_budget(usual)) size = align_up(bytes, kPage);
    if (over_budget(size)) {
      if (dropping == 0 && coming == 0) return no_budget(bytes);
      hurry = true;  // some of it is given back, or added
      changed.wait(mutex);
      return ok();
    }
    PrefaultMethod how = method;
    NumaTarget target = numa;
    const TouchPages touch = [&](auto... how_much) { touch_on_target(*options.numa, target, how_much...); };
    Slabs fresh;
    ArenaSlab& slab = fresh.emplace(nullptr, ArenaSlab{.size = size}).first->second;
    slab.range = ranges.make();
    const bool others_end = dropping > 0 || coming > 0;  // then more may be free
    growing = size;
    held += size;
    hurry = true;
    mutex.unlock();
    bool fits = false;
    const Status taken = try_catch([&]() -> Status {
      TORPOR_ASSIGN_OR_RETURN(slab.size, fitting(size, align_up(bytes, kPage)));
      TORPOR_ASSIGN_OR_RETURN(slab.data, map_slab(slab.size, *options.numa, target));
      how.huge_pages = how.huge_pages && wants_huge_pages();
      const Status touched = touch_all(slab, how, touch);
      fits = touched.has_value();
      return touched;
    });
    if (taken) pin_slab(slab, options.pin_for, slab.size);
    mutex.lock();
    growing = 0;
    numa = std::move(target);
    if (taken) {
      held -= size - slab.size;
      insert(fresh);
    } else {
      held -= size;
      ranges.forget(slab.range);
    }
    changed.notify_all();
    if (fits || !others_end) return taken;
    if (dropping > 0 || coming > 0) changed.wait(mutex);
    return ok();
  }

  // Insert the one slab in `fresh`. Allocates nothing.
  void insert(Slabs& fresh) TORPOR_REQUIRES(mutex) {
    auto entry = fresh.extract(fresh.begin());
    ArenaSlab& slab = entry.mapped();
    entry.key() = slab.data;
    slab.range->data = slab.data;
    slab.range->size = slab.size;
    ranges.add(*slab.range);
    count_unpinned(slab, true);
    slabs.insert(std::move(entry));
  }
  void count_unpinned(const ArenaSlab& slab, bool there) TORPOR_REQUIRES(mutex) {
    const uint64_t bytes = options.pin_for == nullptr ? 0 : slab.size - slab.pinned;
    unpinned = there ? unpinned + bytes : unpinned - bytes;
    if (slab.pin_later) pin_later = there ? pin_later + 1 : pin_later - 1;
  }

  // Do the work of HostArena::prefault_slowly(). Releases the lock meanwhile.
  Result<uint64_t> grow_slowly(uint64_t bytes, const GoOn& go_on, const OnThread& on_thread) TORPOR_REQUIRES(mutex) {
    while (growing > 0) changed.wait(mutex);
    try_pinning_again();
    if (free_bytes() >= bytes) return 0;
    const uint64_t size = align_up(std::min(bytes - free_bytes(), options.slab_bytes), kPage);
    if (over_budget(size)) return 0;
    NumaTarget target = numa;
    Slabs fresh;
    ArenaSlab& slab = fresh.emplace(nullptr, ArenaSlab{}).first->second;
    slab.range = ranges.make();
    if (coming == 0) hurry = false;
    coming += size;
    held += size;
    mutex.unlock();
    const Status taken = try_catch([&]() -> Status {
      TORPOR_ASSIGN_OR_RETURN(slab.data, map_slab(size, *options.numa, target));
      prefer_huge_pages(slab.data, size, wants_huge_pages());
      for (uint64_t piece = 0; slab.size < size; slab.size += piece) {
        if (slab.size - slab.pinned >= kQuietPin && !slab.refused) pin_slab(slab, options.pin_for, kQuietPin);
        piece = std::min(kHugePage, size - slab.size);
        if (!go_on(piece) || hurry) break;
        on_thread([&] { touch_on_target(*options.numa, target, slab.data + slab.size, piece, /*populate=*/true); });
      }
      return ok();
    });
    if (slab.data != nullptr) unmap_fresh(slab.data + slab.size, size - slab.size);
    if (!slab.refused) pin_slab(slab, options.pin_for, kQuietPin);
    mutex.lock();
    coming -= size;
    held -= size - slab.size;
    numa = std::move(target);
    const uint64_t came = slab.size;
    came > 0 ? insert(fresh) : ranges.forget(slab.range);
    changed.notify_all();
    if (!taken) return taken.error();
    return came;
  }

  // Pin the slabs that the device would not pin before, but only unused ones: a copy that is being enqueued must not
  // find a part of its memory pinned. Releases the lock meanwhile.
  void try_pinning_again() TORPOR_REQUIRES(mutex) {
    std::byte* next = nullptr;
    while (pin_later > 0) {
      auto at = slabs.lower_bound(next);
      while (at != slabs.end() && !(at->second.pin_later && at->second.unused())) ++at;
      if (at == slabs.end()) return;
      auto entry = slabs.extract(at);
      ArenaSlab& slab = entry.mapped();
      next = slab.data + slab.size;
      ranges.remove(*slab.range);
      count_unpinned(slab, false);
      dropping += slab.size;
      mutex.unlock();
      pin_slab(slab, options.pin_for, kQuietPin);
      mutex.lock();
      dropping -= slab.size;
      count_unpinned(slab, true);
      ranges.add(*slab.range);
      slabs.insert(std::move(entry));
      changed.notify_all();
    }
  }

  void lend(Span& span, HostArena& arena, Range* range, uint64_t bytes) TORPOR_REQUIRES(mutex) {
    used += range->size;
    span.arena_ = &arena;
    span.data_ = range->data;
    span.size_ = bytes;
    span.range_ = range;
  }

  void give_back(Range* range) TORPOR_REQUIRES(mutex) {
    used -= range->size;
    ranges.give_back(range);
    changed.notify_all();
  }

  // Releases the lock meanwhile.
  Status grow_to(uint64_t bytes, uint64_t most_at_once) TORPOR_REQUIRES(mutex) {
    try_pinning_again();
    while (!ending && free_bytes() < bytes) {
      const uint64_t wanted = missing(bytes);
      const Status grown = grow(std::min(wanted, most_at_once));
      if (!grown && (grown.error().code != Code::kResourceExhausted || !call_reclaim(wanted))) return grown;
    }
    return ok();
  }

  // Call Reclaim; return whether it freed anything. Releases the lock meanwhile.
  bool call_reclaim(uint64_t bytes) TORPOR_REQUIRES(mutex) {
    if (!reclaim) return false;
    const Reclaim unlocked = reclaim;
    mutex.unlock();
    const uint64_t freed = unlocked(bytes);
    mutex.lock();
    return freed > 0;
  }

  // Do the work of HostArena::trim(). Releases the lock meanwhile.
  uint64_t trim(uint64_t keep_bytes, uint64_t leave_free) TORPOR_REQUIRES(mutex) {
    uint64_t given = 0;
    Slabs stay;  // slabs that could not be given back
    const auto goes = [&](const ArenaSlab& slab) TORPOR_REQUIRES(mutex) {
      return !slab.stuck && slab.unused() && free_bytes() >= slab.size + leave_free;
    };
    while (true) {
      auto slab = slabs.begin();
      while (slab != slabs.end() && !goes(slab->second)) ++slab;
      if (slab == slabs.end() || held - growing - dropping - coming <= keep_bytes) break;
      // While the slab is given back no other call may find it.
      auto entry = slabs.extract(slab);
      const ArenaSlab& going = entry.mapped();
      const uint64_t size = going.size;
      ranges.remove(*going.range);
      dropping += size;
      mutex.unlock();
      const bool gone = drop_slab(going, options.pin_for);
      mutex.lock();
      dropping -= size;
      if (gone) {
        held -= size;
        given += size;
        count_unpinned(going, false);
        ranges.forget(going.range);
      } else {
        ranges.add(*going.range);
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
  end_prefault();
  if (impl_->background.joinable()) impl_->background.join();
  for (const auto& [base, slab] : impl_->slabs) (void)drop_slab(slab, impl_->options.pin_for);
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
  arena->impl_->budget = options.budget_bytes;
  arena->impl_->method.threads = options.prefault_threads;
  if (options.pin_for != nullptr) arena->impl_->numa.node = options.pin_for->host_numa_node();
  return arena;
}

Result<HostArena::Span> HostArena::allocate(uint64_t bytes) {
  Span span;
  if (bytes == 0) return span;
  const uint64_t size = align_up(bytes, kPage);
  Impl& impl = *impl_;
  const MutexLock lock(impl.mutex);
  Impl::Range* range = nullptr;
  while ((range = impl.ranges.take(size)) == nullptr) {
    const Status grown = impl.grow(size);
    if (grown) continue;
    if (grown.error().code != Code::kResourceExhausted) return grown.error();
    if (!impl.call_reclaim(size) && impl.trim(0, 0) == 0) return grown.error();
  }
  impl.lend(span, *this, range, bytes);
  return span;
}

HostArena::Span HostArena::allocate_held(uint64_t bytes) {
  Span span;
  const MutexLock lock(impl_->mutex);
  Impl::Range* const range = bytes == 0 ? nullptr : impl_->ranges.take(align_up(bytes, kPage));
  if (range != nullptr) impl_->lend(span, *this, range, bytes);
  return span;
}

Status HostArena::prefault(uint64_t bytes) {
  const MutexLock lock(impl_->mutex);
  return impl_->grow_to(bytes, std::numeric_limits<uint64_t>::max());
}

Status HostArena::check_free(uint64_t bytes) const {
  const MutexLock lock(impl_->mutex);
  return impl_->check_free(bytes);
}

Status HostArena::ensure_free(uint64_t bytes) {
  const MutexLock lock(impl_->mutex);
  while (true) {
    Status checked = impl_->check_free(bytes);
    if (checked || !impl_->call_reclaim(impl_->missing(bytes))) return checked;
  }
}

struct HostArena::Ahead::Work {
  std::atomic<bool> stop = false;
  std::thread thread;
};
HostArena::Ahead::Ahead() = default;
HostArena::Ahead::Ahead(Ahead&&) noexcept = default;
HostArena::Ahead& HostArena::Ahead::operator=(Ahead&& other) noexcept {
  std::swap(work_, other.work_);
  return *this;
}
HostArena::Ahead::~Ahead() {
  if (work_ == nullptr) return;
  work_->stop = true;
  if (work_->thread.joinable()) work_->thread.join();
}

Result<HostArena::Ahead> HostArena::prefault_ahead(uint64_t bytes) {
  Impl& impl = *impl_;
  Ahead ahead;
  const MutexLock lock(impl.mutex);
  const uint64_t piece = impl.options.piece_bytes;
  const uint64_t rests = impl.missing(bytes) / piece * impl.options.slab_bytes;  // more than is lost between pieces
  const bool scarce = rests > 0 && !impl.check_free(bytes + rests);
  const uint64_t missing = impl.missing(bytes);
  const bool at_once = missing <= piece || scarce || impl.over_budget(missing + rests);
  const uint64_t target = impl.held + missing;
  TORPOR_RETURN_IF_ERROR(impl.grow_to(at_once ? bytes : bytes - missing + piece, std::numeric_limits<uint64_t>::max()));
  if (at_once) return ahead;
  ahead.work_ = std::make_shared<Ahead::Work>();
  // Ignore an error: the allocation that needs the memory reports it.
  const auto rest = [&impl, target, piece, &work = *ahead.work_] {
    (void)try_catch([&]() -> Status {
      const MutexLock held(impl.mutex);
      while (!work.stop && !impl.ending && impl.held < target)
        TORPOR_RETURN_IF_ERROR(impl.grow(std::min(target - impl.held, piece)));
      return ok();
    });
  };
  (void)try_catch([&] {  // no thread: the memory comes when it is needed
    ahead.work_->thread = std::thread(rest);
    return ok();
  });
  return ahead;
}

void HostArena::prefault_in_background(uint64_t bytes) {
  Impl& impl = *impl_;
  const auto work = [&impl, bytes] {
    Status done = try_catch([&]() -> Status {
      const PrefaultMethod method = fastest_prefault(impl.options.prefault_threads);
      const MutexLock lock(impl.mutex);
      impl.method = method;
      return impl.grow_to(bytes, std::max(impl.options.slab_bytes, kPage));
    });
    const MutexLock lock(impl.mutex);
    impl.background_result = std::move(done);  // a copy could throw
    impl.prefaulting = false;
    impl.changed.notify_all();
  };
  {
    const MutexLock lock(impl.mutex);
    while (impl.prefaulting) impl.changed.wait(impl.mutex);
    impl.prefaulting = true;
    if (impl.background.joinable()) impl.background.join();  // it has ended its work
    try {
      impl.background = std::thread(work);
      return;
    } catch (const std::exception& error) {
      log().warn("host memory is prefaulted on the calling thread: {}", error.what());
    }
  }
  work();
}

Status HostArena::wait_prefault() {
  const MutexLock lock(impl_->mutex);
  while (impl_->prefaulting) impl_->changed.wait(impl_->mutex);
  return impl_->background_result;
}

void HostArena::end_prefault() noexcept {
  const MutexLock lock(impl_->mutex);
  impl_->ending = true;
  while (impl_->prefaulting) impl_->changed.wait(impl_->mutex);
}

Result<uint64_t> HostArena::prefault_slowly(uint64_t bytes, const GoOn& go_on, const OnThread& on_thread) {
  const OnThread here = [](const std::function<void()>& touch) { touch(); };
  return try_catch([&]() -> Result<uint64_t> {
    const MutexLock lock(impl_->mutex);
    return impl_->grow_slowly(bytes, go_on, on_thread ? on_thread : here);
  });
}

uint64_t HostArena::trim(uint64_t keep_bytes, uint64_t leave_free) {
  const MutexLock lock(impl_->mutex);
  const uint64_t given = impl_->trim(keep_bytes, leave_free);
  impl_->try_pinning_again();
  return given;
}

void HostArena::set_reclaim(Reclaim reclaim) {
  const MutexLock lock(impl_->mutex);
  impl_->reclaim.swap(reclaim);
}

void HostArena::set_budget(uint64_t bytes) {
  const MutexLock lock(impl_->mutex);
  impl_->budget = bytes;
}

HostArenaInfo HostArena::info() const {
  const MutexLock lock(impl_->mutex);
  return {.budget_bytes = impl_->budget,
          .held_bytes = impl_->held - impl_->growing - impl_->coming,
          .used_bytes = impl_->used,
          .unpinned_bytes = impl_->unpinned,
          .numa_node = impl_->numa.node,
          .prefault_method = impl_->method};
}

HostArena::Span::~Span() {
  if (arena_ == nullptr) return;
  const MutexLock lock(arena_->impl_->mutex);
  arena_->impl_->give_back(range_);
}

HostArena::Span::Span(Span&& other) noexcept
    : arena_(std::exchange(other.arena_, nullptr)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      range_(std::exchange(other.range_, nullptr)) {}

HostArena::Span& HostArena::Span::operator=(Span&& other) noexcept {
  std::swap(arena_, other.arena_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(range_, other.range_);
  return *this;
}

}  // namespace torpor
