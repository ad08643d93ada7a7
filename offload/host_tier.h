// SPDX-License-Identifier: Apache-2.0
// HostTier: chunks in the host arena, one span each, or in memory that somebody lends. Destroying it gives the memory
// back to the arena.
//
// With a codec each chunk is packed on its way in and unpacked on its way out, in pieces of memory of the caller's: the
// tier is not addressable then. What does not get smaller, or what there is no memory to pack, lies there as it is.
// Each takes whole pages. Until finish() the tier also has memory for a packed chunk for each thread that puts some,
// and the arena brings up what is missing.
#pragma once

#include <memory>
#include <vector>

#include "allocator/host_arena.h"
#include "base/mutex.h"
#include "offload/record_store.h"
#include "offload/scratch.h"

namespace torpor {

class HostTier final : public RecordStore {
 public:
  // `arena` outlives the tier. `codec`: none or bf16.
  explicit HostTier(HostArena& arena, Codec codec = Codec::kNone)
      : traits_{.kind = "host", .in_memory = true, .addressable = codec == Codec::kNone},
        arena_(arena),
        codec_(codec) {}
  const StoreTraits& traits() const override { return traits_; }
  // Packed: as much as they need at least. Of much that is missing, a piece is there when it returns.
  Status prepare(uint64_t bytes, uint64_t chunks) override;
  Result<std::span<std::byte>> place(SavedChunk& chunk) override;
  std::span<std::byte> view(const SavedChunk& chunk) override;  // empty for a packed one, too
  void put(std::span<RecordPart> parts) override;
  void get(std::span<RecordPart> parts) override;
  Status finish() override {
    scratch_.clear();
    ahead_ = {};
    return ok();
  }
  // A chunk whose bytes lie in the arena already; fills its offset. Takes memory first, then the span.
  void adopt(SavedChunk& chunk, HostArena::Span&& span);
  // A chunk whose bytes, encoded so, lie in memory of `owner`, who changes nothing there for as long as this tier may
  // be asked for it; fills its offset. All of a tier have one owner, which is kept. Precondition: readable(codec)
  void borrow(SavedChunk& chunk, std::span<std::byte> bytes, Codec codec, std::shared_ptr<const void> owner);
  bool readable(Codec codec) const { return codec == Codec::kNone || codec == codec_; }
  // The memory of a chunk of this tier, which is in it no more; empty if it is not there, or borrowed.
  HostArena::Span release(const SavedChunk& chunk) noexcept;
  // A copy may still read or write there: it is kept until the process ends. Null is nothing. Takes no memory.
  static void abandon(std::unique_ptr<HostTier> tier) noexcept;

 private:
  Status pack(RecordPart& part, std::span<std::byte> room);
  Status unpack(const RecordPart& part);

  const StoreTraits traits_;
  HostArena& arena_;
  const Codec codec_;
  ScratchPool scratch_;
  HostArena::Ahead ahead_;  // ends before the spans go
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
