// SPDX-License-Identifier: Apache-2.0
// HostArena: host memory for saved bytes and for staging. It is prefaulted once, reused for ever, and limited by a
// budget.
//
// Owner: one per process. Spans are move-only and return themselves; the arena must outlive them. Memory of returned
// spans stays with the arena until trim(), which makes a second sleep cheap. Threads: all methods are safe from any
// thread. While some memory is prefaulted and pinned, or unpinned and given back, other memory can be allocated; a call
// waits only if it needs more than is there.
//
// If a device wants it, the memory comes from the NUMA node to which the device is attached (numa_memory.h), and is
// pinned. If that fails the memory is used as it is, which is slower: see HostArenaInfo. If the device would not pin
// memory only at that time, the arena tries again when memory is prefaulted or given back and the slab is unused.
// Memory that cannot be unpinned is never given back to the system.
//
// An allocation takes constant time, however many ranges are free (allocator/arena_ranges.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "allocator/arena_ranges.h"
#include "allocator/numa_memory.h"
#include "allocator/prefault.h"
#include "base/status.h"

namespace torpor {

class DeviceMemory;

struct HostArenaOptions {
  uint64_t budget_bytes = 0;  // most bytes to hold from the system; 0: no limit
  // Least size of a piece that is taken from the system; the first ones may be smaller.
  uint64_t slab_bytes = 64ull << 20;
  int prefault_threads = 0;             // 0: the number of cores, at most 8
  uint64_t piece_bytes = 256ull << 20;  // prefault_ahead() prefaults so much at once
  DeviceMemory* pin_for = nullptr;      // must outlive the arena; null: pin nothing, take memory from any node
  NumaSystem* numa = &linux_numa();     // must outlive the arena
  HugePages huge_pages;                 // asked before memory is taken from the system
  // Returns how many bytes can be taken from the system before it ends a process; none: not known. Asked before memory
  // is taken, without locks. Null: never known. prefault_slowly() does not ask.
  std::function<std::optional<uint64_t>()> free_memory{};
};

struct HostArenaInfo {
  uint64_t budget_bytes = 0;
  uint64_t held_bytes = 0;         // taken from the system
  uint64_t used_bytes = 0;         // in spans
  uint64_t unpinned_bytes = 0;     // held, but the device would not pin it
  std::optional<int> numa_node{};  // the node that is asked for memory; other nodes serve when it is full
  PrefaultMethod prefault_method{};
};

class HostArena {
 public:
  class Span {
   public:
    Span() = default;
    ~Span();
    Span(Span&& other) noexcept;
    Span& operator=(Span&& other) noexcept;
    std::span<std::byte> bytes() const { return {data_, size_}; }
    bool empty() const { return size_ == 0; }

   private:
    friend class HostArena;
    HostArena* arena_ = nullptr;
    std::byte* data_ = nullptr;
    uint64_t size_ = 0;
    ArenaRanges::Range* range_ = nullptr;
  };

  static Result<std::unique_ptr<HostArena>> create(HostArenaOptions options = {});
  ~HostArena();

  // A function that reclaims memory under pressure: it frees spans of at least `bytes` bytes if it can and returns the
  // number of bytes freed. It is called without locks, by any thread that needs memory, and must not throw. Null: none.
  using Reclaim = std::function<uint64_t(uint64_t bytes)>;
  void set_reclaim(Reclaim reclaim);

  // Return contiguous memory, aligned to 4096 bytes. kResourceExhausted: it is beyond the budget, although Reclaim
  // freed nothing more and unused memory of other sizes was given back to the system; or the system has no memory for
  // it (HostArenaOptions::free_memory). The error says how much is held and how much is missing.
  Result<Span> allocate(uint64_t bytes);
  // Return a span of memory that is already held; empty if no free range is large enough. Takes nothing from the system
  // and does not call Reclaim.
  Span allocate_held(uint64_t bytes);
  // Prefault memory until at least `bytes` bytes are held and unused. kResourceExhausted, as allocate(): nothing was
  // taken.
  Status prefault(uint64_t bytes);
  // Return kResourceExhausted if the system has no memory for what is missing until `bytes` bytes are held and unused.
  // Takes nothing, and ignores the budget. Other processes may take the memory afterwards.
  Status check_free(uint64_t bytes) const;
  // Do the same, but while the system has too little memory, call Reclaim and check again; fail when Reclaim frees
  // nothing more.
  Status ensure_free(uint64_t bytes);
  // Do the work of prefault(), but return when a first piece of the missing memory is there
  // (HostArenaOptions::piece_bytes). A thread brings the rest, piece by piece, while the first is used; it stops when
  // the result is destroyed. The arena must outlive the result. If a piece cannot be had, the allocation that needs it
  // fails. Near the budget, or if the system has little more memory, all pieces come at once, because the remainders
  // between pieces would be missing there.
  class Ahead {
   public:
    Ahead();
    ~Ahead();
    Ahead(Ahead&& other) noexcept;
    Ahead& operator=(Ahead&& other) noexcept;

   private:
    friend class HostArena;
    struct Work;
    std::shared_ptr<Work> work_;
  };
  Result<Ahead> prefault_ahead(uint64_t bytes);
  // Do the work of prefault() on a thread of the arena, slab by slab, with the fastest method of a short measurement. A
  // call that needs more memory meanwhile waits for at most one slab. wait_prefault() returns the error, if any. The
  // arena's destructor stops the thread.
  void prefault_in_background(uint64_t bytes);
  void end_prefault() noexcept;  // stop prefault_in_background(); waits for the slab under way
  Status wait_prefault();
  // Prefault one slab of the memory that is missing until `bytes` bytes are held and unused.
  //
  // Before each huge page, call `go_on` (without locks) and stop if it returns false. If another call needs new memory,
  // stop with what is there, so that nobody waits. Return the bytes that were added; 0: nothing is missing, the budget
  // is used up, or `go_on` said no. `on_thread`, if given, runs the function that touches memory on a thread of its
  // choice, and returns after it. This thread pins the memory, in pieces of at most 8 MiB.
  using GoOn = std::function<bool(uint64_t next_bytes)>;
  using OnThread = std::function<void(const std::function<void()>& touch)>;
  Result<uint64_t> prefault_slowly(uint64_t bytes, const GoOn& go_on, const OnThread& on_thread = {});
  // Never use the span's memory again, because a copy may still write into it. It counts as used for ever.
  static void quarantine(Span span) { span.arena_ = nullptr; }
  // Give unused slabs back to the system while more than `keep_bytes` are held, and leave at least `leave_free` bytes
  // of unused memory if there are as many. Return the number of bytes given back.
  uint64_t trim(uint64_t keep_bytes = 0, uint64_t leave_free = 0);
  void set_budget(uint64_t bytes);  // 0: no limit. What is held above it stays until trim()
  HostArenaInfo info() const;

 private:
  struct Impl;
  explicit HostArena(HostArenaOptions options);
  std::unique_ptr<Impl> impl_;
};

}  // namespace torpor
