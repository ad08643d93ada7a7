// SPDX-License-Identifier: Apache-2.0
// HostTier: chunks in the host arena, one span each, or in memory that an owner lends. The destructor gives the spans
// back to the arena.
//
// With a codec, the thread that puts a chunk packs it from the caller's memory, and the thread that gets it unpacks it
// into the caller's memory; the tier is not addressable. A chunk that does not get smaller, or for which there is no
// memory to pack it, is stored unchanged. Each chunk takes whole pages. Until finish(), the tier also has memory for a
// packed chunk for each thread that puts, and the arena prefaults the memory that prepare() asked for.
//
// Threads: as RecordStore.
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
  // Prefault memory for the chunks; for packed chunks, as much as they need at least. If much is missing, a part of it
  // is ready on return.
  Status prepare(uint64_t bytes, uint64_t chunks) override;
  // Return the bytes that such chunks need at least.
  static uint64_t least_bytes(Codec codec, uint64_t bytes, uint64_t chunks);
  Result<std::span<std::byte>> place(SavedChunk& chunk) override;
  std::span<std::byte> view(const SavedChunk& chunk) override;  // empty for a packed chunk too
  void put(std::span<RecordPart> parts) override;
  void get(std::span<RecordPart> parts) override;
  Status finish() override {
    scratch_.clear();
    ahead_ = {};
    return ok();
  }
  // Add a chunk whose bytes are in `span` already; set its offset. Takes `span` only after memory for the entry was
  // allocated.
  void adopt(SavedChunk& chunk, HostArena::Span&& span);
  // Add a chunk whose bytes, encoded with `codec`, lie in memory of `owner`; set its offset. `owner` must not change
  // them while this tier can be read. All borrowed chunks of a tier have one owner, which the tier keeps alive.
  // Precondition: readable(codec)
  void borrow(SavedChunk& chunk, std::span<std::byte> bytes, Codec codec, std::shared_ptr<const void> owner);
  bool readable(Codec codec) const { return codec == Codec::kNone || codec == codec_; }
  // Remove a chunk from this tier and return its memory; empty if the tier does not have it, or borrowed it.
  HostArena::Span release(const SavedChunk& chunk) noexcept;
  // Release all chunks but these, the borrowed ones too, and set the offsets of these. Precondition: the tier has them
  // and borrowed none of them. If memory runs out (std::bad_alloc), nothing changes.
  void keep_only(std::span<SavedChunk> chunks);
  // Keep `tier` until the process ends, because a copy may still read or write its memory. Ignores null. Allocates
  // nothing.
  static void abandon(std::unique_ptr<HostTier> tier) noexcept;

 private:
  Status pack(RecordPart& part, std::span<std::byte> room);
  Status unpack(const RecordPart& part);

  const StoreTraits traits_;
  HostArena& arena_;
  const Codec codec_;
  ScratchPool scratch_;
  HostArena::Ahead ahead_;  // destroyed before the spans
  const HostTier* abandoned_before_ = nullptr;
  Mutex mutex_;
  struct Place {
    HostArena::Span span;  // empty: borrowed
    std::span<std::byte> bytes;
  };
  std::shared_ptr<const void> lender_ TORPOR_GUARDED_BY(mutex_);
  std::vector<Place> places_ TORPOR_GUARDED_BY(mutex_);  // indexed by SavedChunk::offset
};

}  // namespace torpor
