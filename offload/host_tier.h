// HostTier: chunks in the host arena, one span each, or in memory that somebody lends. Destroying it gives the memory
// back to the arena.
#pragma once

#include <memory>
#include <vector>

#include "allocator/host_arena.h"
#include "base/mutex.h"
#include "offload/tier.h"

namespace torpor {

class HostTier final : public Tier {
 public:
  explicit HostTier(HostArena& arena) : arena_(arena) {}  // `arena` outlives the tier
  std::string_view kind() const override { return "host"; }
  bool addressable() const override { return true; }
  Status prepare(uint64_t bytes, uint64_t chunks) override;
  Result<std::span<std::byte>> place(SavedChunk& chunk) override;
  std::span<std::byte> view(const SavedChunk& chunk) override;
  Status finish() override { return ok(); }
  // A chunk whose bytes lie in the arena already; fills its offset. Takes memory first, then the span.
  void adopt(SavedChunk& chunk, HostArena::Span&& span);
  // A chunk whose bytes lie in memory of `owner`, who changes nothing there for as long as this tier may be asked for
  // it; fills its offset. All of a tier have one owner, which is kept.
  void borrow(SavedChunk& chunk, std::span<std::byte> bytes, std::shared_ptr<const void> owner);
  // The bytes of a chunk of this tier, which is in it no more; empty if it is not there, or borrowed.
  HostArena::Span release(const SavedChunk& chunk) noexcept;
  // A copy may still read or write there: it is kept until the process ends. Null is nothing. Takes no memory.
  static void abandon(std::unique_ptr<HostTier> tier) noexcept;

 private:
  HostArena& arena_;
  const HostTier* abandoned_before_ = nullptr;
  Mutex mutex_;
  struct Place {
    HostArena::Span span;  // empty: borrowed
    std::span<std::byte> bytes;
  };
  std::shared_ptr<const void> lender_ TORPOR_GUARDED_BY(mutex_);
  std::vector<Place> places_ TORPOR_GUARDED_BY(mutex_);  // SavedChunk::offset is the position in it
};

}  // namespace torpor
