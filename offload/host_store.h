// SPDX-License-Identifier: Apache-2.0
// HostStore: KV blocks in host memory: slots of one size in the arena, reused. Each slot lies at a multiple of 4096, or
// of 64 if blocks are packed. A put into a used slot replaces its content. The content ends with the process.
//
// With a codec, the thread that puts or gets a block packs or unpacks it, and the store is not addressable. A slot then
// fits a block of bf16 values of KV once it is packed. A block that stays larger goes to one of a few overflow slots.
// If all of these are in use, the block is not stored: kResourceExhausted. Each thread that packs keeps memory of a
// block's size, outside of the arena.
//
// Threads: as SlotStore.
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
  uint64_t slot_bytes = 0;         // largest size of a block
  Codec codec = Codec::kNone;      // or bf16
  std::optional<int32_t> whole{};  // overflow slots of slot_bytes; no value: one for 384 slots
  uint64_t bytes() const;          // needed in the arena; 0: the options are invalid
};

class HostStore final : public SlotStore {
 public:
  // Allocate all slots. `arena` outlives the result. kInvalidArgument if the options are invalid; kResourceExhausted if
  // the arena has no space for all slots.
  static Result<std::unique_ptr<HostStore>> create(HostArena& arena, HostStoreOptions options);
  // Return how many slots fit into `bytes` bytes of the arena.
  static uint64_t slots_in(uint64_t bytes, uint64_t slot_bytes, Codec codec);

  const StoreTraits& traits() const override { return traits_; }
  void open_space(uint32_t, const Digest&) override {}
  Result<std::span<std::byte>> place(SavedChunk& chunk) override;
  Status placed(StoreSlot slot, const Digest& digest) override;
  std::span<std::byte> view(const SavedChunk& chunk) override;
  void drop(std::span<const SlotRange> ranges) override;
  Status sync() override { return ok(); }
  StoreHealth health() const override;
  // The content of a slot, in its stored form.
  struct Stored {
    StoredRecord record;
    std::span<std::byte> bytes;  // record.stored bytes
  };
  // Return the content of a slot that was put, or placed and proven; no value if there is none.
  std::optional<Stored> stored(StoreSlot slot) const;

 private:
  struct Content {
    StoredRecord record;
    int32_t whole = -1;  // the overflow slot that has the bytes; -1: the slot itself
    bool found = false;  // false: only placed
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
  const HostArena::Span memory_;  // the slots, then the overflow slots
  ScratchPool scratch_;
  mutable Mutex mutex_;  // never held over a copy
  std::vector<Content> contents_ TORPOR_GUARDED_BY(mutex_);
  std::vector<int32_t> whole_uses_ TORPOR_GUARDED_BY(mutex_);  // by overflow slot: its slot and its readers
  std::vector<int32_t> whole_free_ TORPOR_GUARDED_BY(mutex_);
  StoreHealth health_ TORPOR_GUARDED_BY(mutex_);
};

}  // namespace torpor
