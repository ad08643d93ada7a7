// HostArena: host memory for saved bytes and staging, pre-faulted once, reused for ever, charged against a budget.
//
// Owner: one a process. Spans are move-only and return themselves; the arena must outlive them. Memory of returned spans
// stays with the arena (that is what makes a second sleep cheap) until trim().
// Threads: all methods are safe from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/status.h"

namespace torpor {

struct HostArenaOptions {
  uint64_t budget_bytes = 0;      // most that may be held from the system; 0: no limit
  uint64_t slab_bytes = 64ull << 20;  // memory is taken from the system in pieces of at least this size
  int prefault_threads = 0;       // 0: as many as the machine has cores, at most 8
};

struct HostArenaInfo {
  uint64_t budget_bytes = 0;
  uint64_t held_bytes = 0;  // taken from the system
  uint64_t used_bytes = 0;  // in spans
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
  };

  static Result<std::unique_ptr<HostArena>> create(HostArenaOptions options = {});
  ~HostArena();

  // Contiguous, aligned to 4096 bytes. kResourceExhausted beyond the budget: says how much is held and how much missing.
  Result<Span> allocate(uint64_t bytes);
  // Takes memory from the system and touches it now, so that at least `bytes` are held and not in use.
  Status prefault(uint64_t bytes);
  // The span's memory is never used again: a copy may still write into it. It counts as used for ever.
  static void quarantine(Span span) { span.arena_ = nullptr; }
  // Gives slabs without a live span back to the system; returns how many bytes.
  uint64_t trim();
  HostArenaInfo info() const;

 private:
  struct Impl;
  explicit HostArena(HostArenaOptions options);
  void give_back(std::byte* data, uint64_t size);
  std::unique_ptr<Impl> impl_;
};

}  // namespace torpor
