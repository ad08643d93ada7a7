// SPDX-License-Identifier: Apache-2.0
// StoreTier: a store as one job of the transfer engine sees it: chunk number i of the job is the job's i-th slot. Made
// for one job and never changed, so the engine's threads need no lock for it.
#pragma once

#include <vector>

#include "offload/store.h"
#include "offload/tier.h"

namespace torpor {

class StoreTier final : public Tier {
 public:
  // `keys`: of each slot, or none. The store outlives it.
  StoreTier(Store& store, std::vector<StoreSlot> slots, std::vector<BlockKey> keys)
      : store_(store), slots_(std::move(slots)), keys_(std::move(keys)) {}
  std::string_view kind() const override { return store_.traits().kind; }
  bool addressable() const override { return store_.traits().addressable; }
  bool in_memory() const override { return store_.traits().in_memory; }
  bool remote() const override { return store_.traits().shared; }
  Status prepare(uint64_t, uint64_t) override { return ok(); }
  Status finish() override { return ok(); }
  Result<std::span<std::byte>> place(SavedChunk& chunk) override;
  std::span<std::byte> view(const SavedChunk& chunk) override { return store_.view(slot(chunk)); }
  void put(std::span<TierPart> parts) override;
  void get(std::span<TierPart> parts) override;
  void find(std::span<TierPart> parts) override;

 private:
  std::vector<StorePart> records_of(std::span<const TierPart> parts) const;
  StoreSlot slot(const SavedChunk& chunk) const { return slots_[static_cast<size_t>(chunk.key.index)]; }

  Store& store_;
  const std::vector<StoreSlot> slots_;
  const std::vector<BlockKey> keys_;
};

}  // namespace torpor
