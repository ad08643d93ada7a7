// KV blocks in two tiers: the device's, and host memory below it; and the two ways between them.
//
// OffloadRoute carries blocks down for an OffloadPipeline; onboard() brings a prefix back up. Both copy through the
// TransferExecutor, and a block is registered in the tier it goes to only after its copy is proven (I2). On the way up its
// digest must be right, otherwise it is dropped from host memory: a miss, never data (I8).
//
// Threads: all methods from any; copies one batch at a time. The pools, the layout and the executor outlive these objects.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "allocator/host_arena.h"
#include "kvcache/block_pool.h"
#include "kvcache/kv_layout.h"
#include "offload/block_route.h"
#include "offload/tier.h"
#include "offload/transfer_executor.h"

namespace torpor {

// The name by which a pipeline knows a registered block.
BlockName name_of(const WeakBlock& block, const BlockIdentity& identity);

// Host memory for blocks: a pool of slots, their bytes, and the digest of each.
class HostBlocks final : public Tier {
 public:
  // `arena` outlives the result. kResourceExhausted when the arena has no room for all slots.
  static Result<std::unique_ptr<HostBlocks>> create(HostArena& arena, BlockPoolOptions options, uint64_t bytes_per_block, EventSink* sink = nullptr);
  BlockPool& pool() { return *pool_; }
  const BlockPool& pool() const { return *pool_; }

  // Tier: a chunk's key.index is its slot.
  std::string_view kind() const override { return "host"; }
  Status prepare(uint64_t, uint64_t) override { return ok(); }
  Result<std::span<std::byte>> place(SavedChunk& chunk) override;
  Status put(SavedChunk& chunk, std::span<const std::byte> bytes) override;
  std::span<std::byte> view(const SavedChunk& chunk) override;
  Status get(const SavedChunk& chunk, std::span<std::byte> bytes) override;
  Status finish() override { return ok(); }

 private:
  friend class TieredBlocks;
  HostBlocks() = default;
  std::unique_ptr<BlockPool> pool_;
  HostArena::Span memory_;
  uint64_t bytes_per_block_ = 0;
  std::vector<Digest> digests_;  // of registered slots; written by who owns the slot
};

struct TieredBlocksInfo {
  uint64_t onboarded = 0;
  uint64_t damaged = 0;      // dropped on the way up: wrong digest
  uint64_t quarantined = 0;  // device blocks whose copy was never proven
};

class TieredBlocks final : public BlockRoute {
 public:
  TieredBlocks(BlockPool& device, const KvLayout& layout, HostBlocks& host, TransferExecutor& executor)
      : device_(device), layout_(layout), host_(host), executor_(executor) {}

  // BlockRoute, device to host.
  std::string_view name() const override { return "device to host"; }
  bool present(const Digest& key) const override;
  double fill() const override;
  bool upgrade(const BlockName& block) override;
  void transfer(std::span<const BlockName> blocks, std::span<BlockOutcome> outcomes) override;

  // Brings the longest run of `chain` that host memory has up into the device pool; returns it registered there, first block
  // first, perhaps empty. kResourceExhausted when the device pool has no room: nothing is taken then.
  Result<std::vector<BlockRef>> onboard(std::span<const BlockIdentity> chain);

  TieredBlocksInfo info() const;

 private:
  struct Move;
  ChunkPlan plan(int32_t device_slot, int32_t host_slot) const;
  BlockOutcome save_one(Move& move);
  BlockOutcome settle(Move& move, const SavedChunk& saved);

  BlockPool& device_;
  const KvLayout& layout_;
  HostBlocks& host_;
  TransferExecutor& executor_;
  std::mutex copying_;           // the executor does one operation at a time; first in the lock order
  mutable std::mutex mutex_;     // guards all below
  std::map<std::pair<int32_t, uint64_t>, BlockRef> kept_;  // upgraded, by slot and generation
  TieredBlocksInfo info_;
};

}  // namespace torpor
