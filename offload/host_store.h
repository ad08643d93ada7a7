// SPDX-License-Identifier: Apache-2.0
// HostStore: blocks in host memory: slots of one size in the arena, each at a multiple of 4096, or of 64 where they are
// packed. Used again and again; what is put into a used slot replaces what was there. Nothing outlives it.
//
// With a codec each block is packed on its way in and unpacked on its way out, by the thread that puts and gets it: the
// store is not addressable then. A slot has room for a block that gets as small as bf16 values of KV do. One that stays
// larger lies in one of a few whole places; while all of them are in use it is not kept: kResourceExhausted. Each
// thread that packs leaves memory of a block's size behind, outside of the arena.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "allocator/host_arena.h"
#include "base/mutex.h"
#include "offload/scratch.h"
#include "offload/slot_store.h"

namespace torpor {

struct HostStoreOptions {
  int32_t slots = 0;
  uint64_t slot_bytes = 0;         // most of a block
  Codec codec = Codec::kNone;      // or bf16
  std::optional<int32_t> whole{};  // places of slot_bytes beside packed slots; none given: one for 384 slots
  uint64_t bytes() const;          // of the arena; 0: the options are wrong
};

class HostStore final : public SlotStore {
 public:
  // `arena` outlives the result. kResourceExhausted when it has no room for all slots.
  static Result<std::unique_ptr<HostStore>> create(HostArena& arena, HostStoreOptions options);
  // As many as have room in so many bytes of the arena.
  static uint64_t slots_in(uint64_t bytes, uint64_t slot_bytes, Codec codec);

  const StoreTraits& traits() const override { return traits_; }
  void open_space(uint32_t, const Digest&) override {}
  Result<std::span<std::byte>> place(SavedChunk& chunk) override;
  Status placed(StoreSlot slot, const Digest& digest) override;
  std::span<std::byte> view(const SavedChunk& chunk) override;
  void drop(std::span<const SlotRange> ranges) override;
  Status sync() override { return ok(); }
  StoreHealth health() const override;
  // What was put there, or placed and proven, as it lies there; none: nothing was.
  struct Stored {
    StoredRecord record;
    std::span<std::byte> bytes;  // record.stored many
  };
  std::optional<Stored> stored(StoreSlot slot) const;

 private:
  struct Content {
    StoredRecord record;
    int32_t whole = -1;  // the whole place that has it; -1: the slot has
    bool found = false;  // else only placed
  };
  class Reading;
  HostStore(HostStoreOptions options, HostArena::Span memory);
  void do_put(std::span<RecordPart> parts) override;
  void do_get(std::span<RecordPart> parts) override;
  Status put_one(RecordPart& part, std::span<std::byte> room);
  Status get_one(RecordPart& part);
  void count_failed(const Error& error);
  bool packs() const { return options_.codec != Codec::kNone; }
  bool has(StoreSlot slot) const { return slot >= 0 && slot < options_.slots; }
  Error wrong_part(StoreSlot slot, uint64_t bytes) const;
  std::span<std::byte> memory_of(StoreSlot slot, const Content& content) const;
  void forget(Content& content) TORPOR_REQUIRES(mutex_);
  void end_use(int32_t whole) TORPOR_REQUIRES(mutex_);

  const HostStoreOptions options_;
  const StoreTraits traits_;
  const HostArena::Span memory_;  // the slots, and behind them the whole places
  ScratchPool scratch_;
  mutable Mutex mutex_;  // never held over a copy
  std::vector<Content> contents_ TORPOR_GUARDED_BY(mutex_);
  std::vector<int32_t> whole_uses_ TORPOR_GUARDED_BY(mutex_);  // by the slot that has it, and by who reads there
  std::vector<int32_t> whole_free_ TORPOR_GUARDED_BY(mutex_);
  StoreHealth health_ TORPOR_GUARDED_BY(mutex_);
};

}  // namespace torpor
