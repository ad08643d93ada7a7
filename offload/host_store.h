// HostStore: blocks in host memory: slots of one size in the arena, each at a multiple of 4096. Used again and again;
// what is put into a used slot replaces what was there. Nothing outlives it.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "allocator/host_arena.h"
#include "base/mutex.h"
#include "offload/store.h"

namespace torpor {

struct HostStoreOptions {
  int32_t slots = 0;
  uint64_t slot_bytes = 0;
};

class HostStore final : public Store {
 public:
  // `arena` outlives the result. kResourceExhausted when it has no room for all slots.
  static Result<std::unique_ptr<HostStore>> create(HostArena& arena, HostStoreOptions options);

  const StoreTraits& traits() const override { return traits_; }
  void open_space(uint32_t, const Digest&) override {}
  Result<std::span<std::byte>> place(Slot slot, uint64_t bytes) override;
  Status placed(Slot slot, const BlockKey& key, const Digest& digest) override;
  std::span<std::byte> view(Slot slot) override;
  void drop(std::span<const SlotRange> ranges) override;
  Status sync() override { return ok(); }
  StoreHealth health() const override;
  // Of what was put there, or placed and proven; none: nothing was.
  std::optional<StoredRecord> record(Slot slot) const;

 private:
  struct Content {
    StoredRecord record;
    bool found = false;  // else only placed
  };
  HostStore(HostStoreOptions options, HostArena::Span memory);
  void do_put(std::span<StorePart> parts) override;
  void do_get(std::span<StorePart> parts) override;
  bool has(Slot slot) const { return slot >= 0 && slot < options_.slots; }
  std::span<std::byte> memory_of(Slot slot) const;

  const HostStoreOptions options_;
  const StoreTraits traits_;
  const HostArena::Span memory_;
  mutable Mutex mutex_;  // never held over a copy
  std::vector<Content> contents_ TORPOR_GUARDED_BY(mutex_);
  StoreHealth health_ TORPOR_GUARDED_BY(mutex_);
};

}  // namespace torpor
