// BlockStore: a tier of KV blocks below the device: a pool of slots, the bytes of each, and their digests.
//
// A slot is owned through its MutableBlock: claim() it, put() its bytes, remember() what was put, register it. Once it
// is registered, everyone who holds a reference to the block may get() its bytes.
// Threads: as Tier; a slot's owner alone claims and remembers.
#pragma once

#include <memory>
#include <vector>

#include "allocator/host_arena.h"
#include "kvcache/block_pool.h"
#include "offload/tier.h"

namespace torpor {

class BlockStore : public Tier {
 public:
  BlockPool& pool() { return *pool_; }
  const BlockPool& pool() const { return *pool_; }
  uint64_t bytes_per_block() const { return bytes_per_block_; }

  // What identity the block has that the slot's owner is about to put.
  virtual void claim(int32_t, const BlockIdentity&) {}
  void remember(int32_t slot, const Digest& digest) { digests_[static_cast<size_t>(slot)] = digest; }
  // The slot as a chunk, with the digest that was remembered.
  SavedChunk chunk(int32_t slot) const;
  // False while it would be useless to put anything (a disk that fails).
  virtual bool accepting() const { return true; }

  Status prepare(uint64_t, uint64_t) override { return ok(); }
  Status finish() override { return ok(); }

 protected:
  BlockStore(std::unique_ptr<BlockPool> pool, uint64_t bytes_per_block)
      : pool_(std::move(pool)), bytes_per_block_(bytes_per_block), digests_(static_cast<size_t>(pool_->num_blocks())) {}
  static Status check(uint64_t bytes_per_block);

 private:
  std::unique_ptr<BlockPool> pool_;
  const uint64_t bytes_per_block_;
  std::vector<Digest> digests_;
};

// In the host arena, each slot at a multiple of 4096.
class HostBlocks final : public BlockStore {
 public:
  // `arena` and `sink` (may be null) outlive the result. kResourceExhausted when the arena has no room for all slots.
  static Result<std::unique_ptr<HostBlocks>> create(HostArena& arena, BlockPoolOptions options,
                                                    uint64_t bytes_per_block, EventSink* sink = nullptr);
  std::string_view kind() const override { return "host"; }
  bool addressable() const override { return true; }
  Result<std::span<std::byte>> place(SavedChunk& chunk) override;
  std::span<std::byte> view(const SavedChunk& chunk) override;

 private:
  HostBlocks(std::unique_ptr<BlockPool> pool, uint64_t bytes_per_block, HostArena::Span memory)
      : BlockStore(std::move(pool), bytes_per_block), memory_(std::move(memory)) {}
  HostArena::Span memory_;
};

}  // namespace torpor
