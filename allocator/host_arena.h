// SPDX-License-Identifier: Apache-2.0
// HostArena: host memory for saved bytes and staging, pre-faulted once, reused for ever, charged against a budget.
//
// Owner: one a process. Spans are move-only and return themselves; the arena must outlive them. Memory of returned
// spans stays with the arena (that is what makes a second sleep cheap) until trim(). Threads: all methods are safe from
// any thread. While memory is brought up and pinned, or unpinned and given back, what is there can be had; only who
// needs more than that waits.
//
// For a device that wants it, the memory is taken from the NUMA node that the device is attached to (numa_memory.h),
// and pinned. Where that fails it is used as it is, which is slower: see HostArenaInfo. What the device would not pin
// at the time only is tried again when memory is brought up or given back, as long as nobody uses it. Memory that
// cannot be unpinned is never given back to the system.
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
  uint64_t budget_bytes = 0;          // most that may be held from the system; 0: no limit
  uint64_t slab_bytes = 64ull << 20;  // memory is taken from the system in pieces of at least this size; the first ones
                                      // may be smaller
  int prefault_threads = 0;           // 0: as many as the machine has cores, at most 8
  uint64_t piece_bytes = 256ull << 20;  // prefault_ahead() brings up so much at once
  DeviceMemory* pin_for = nullptr;      // outlives the arena; null: nothing is pinned, memory comes from any node
  NumaSystem* numa = &linux_numa();     // outlives the arena
};

struct HostArenaInfo {
  uint64_t budget_bytes = 0;
  uint64_t held_bytes = 0;         // taken from the system
  uint64_t used_bytes = 0;         // in spans
  uint64_t unpinned_bytes = 0;     // held, but the device would not pin it
  std::optional<int> numa_node{};  // that memory is asked for; other nodes help out when it is full
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

  // Whom to ask for spans when there is no room for others: gives back at least so many bytes, or all that it can do
  // without; how many. Called without locks, by whoever needs room; throws nothing. Null: nobody.
  using GiveUp = std::function<uint64_t(uint64_t bytes)>;
  void ask_when_short(GiveUp give_up);

  // Contiguous, aligned to 4096 bytes. kResourceExhausted beyond the budget, when nothing more is given up and what is
  // held unused in other sizes was given back to the system: says how much is held and how much missing.
  Result<Span> allocate(uint64_t bytes);
  // Of what is held: empty if no range of it is as large. Takes nothing from the system, and asks nobody.
  Span allocate_held(uint64_t bytes);
  // Takes memory from the system and touches it now, so that at least `bytes` are held and not in use.
  Status prefault(uint64_t bytes);
  // The same, but returns when a piece of what is missing is there (HostArenaOptions::piece_bytes). The rest comes on a
  // thread of its own, piece by piece, while what is there is used, until the result goes; the arena outlives that. A
  // piece that cannot be had is missed where it is needed. Near the budget all comes at once: what is left between
  // pieces would be missing there.
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
  // The same on a thread of its own, slab by slab, in the way that a short measurement finds the fastest. Who needs
  // more than there is meanwhile waits for a slab at most. What could not be had is told by wait_prefault(); the
  // arena's end stops it.
  void prefault_in_background(uint64_t bytes);
  void end_prefault() noexcept;  // prefault_in_background() brings up nothing more; waits for the piece at work
  Status wait_prefault();
  // Brings up one slab, of what is missing for `bytes` to be held and not in use, huge page by huge page as long as
  // `go_on` (asked before each, without locks) says so. While somebody else needs fresh memory it ends with what it
  // has: nobody waits for it. Returns the bytes that came; 0: nothing is missing, the budget has no room, or it was not
  // to go on.
  // `on_thread`, if it is given, calls what touches the memory, on a thread of its choice, and returns after it. Memory
  // is pinned on this thread in pieces of at most 8 MiB.
  using GoOn = std::function<bool(uint64_t next_bytes)>;
  using OnThread = std::function<void(const std::function<void()>& touch)>;
  Result<uint64_t> prefault_slowly(uint64_t bytes, const GoOn& go_on, const OnThread& on_thread = {});
  // The span's memory is never used again: a copy may still write into it. It counts as used for ever.
  static void quarantine(Span span) { span.arena_ = nullptr; }
  // Gives slabs without a live span back to the system, while more than `keep_bytes` are held; returns how many bytes.
  uint64_t trim(uint64_t keep_bytes = 0);
  HostArenaInfo info() const;

 private:
  struct Impl;
  explicit HostArena(HostArenaOptions options);
  std::unique_ptr<Impl> impl_;
};

}  // namespace torpor
