// BlockTier: KV blocks below the device: a pool, which says who owns which block and finds them by identity, over a
// store, which has their bytes (offload/store.h).
//
// A block is owned through its MutableBlock: claim() it, put() its bytes, remember() what was put, register it. Once it
// is registered, everyone who holds a reference to it may get() its bytes.
//
// In a store whose slots are used once, a block that is evicted leaves its slot unused, and room comes back when the
// oldest segment goes, with what is still in it. So about as many blocks stay as the pool has, and those that were put
// longest ago go first. A block whose segment went while somebody kept it is not found when it is read: a miss.
//
// What the store recovers is known by key alone; a block takes its place in the pool when it is first asked for.
//
// Threads: as Tier; a block's owner alone claims and remembers.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"
#include "kvcache/block_pool.h"
#include "offload/segment_store.h"
#include "offload/store.h"
#include "offload/tier.h"

namespace torpor {

struct BlockTierOptions {
  BlockPoolOptions pool;
  uint64_t bytes_per_block = 0;
  Digest space;  // KeySpace::digest(): of all that a block's bytes depend on beside its tokens
};

// Makes an allocated block hold what `identity` says, ready to be written.
Status begin_filling(MutableBlock& block, const BlockIdentity& identity);

// Segments for a tier of so many blocks: about eight, none larger than 64 MiB.
SegmentStoreOptions segments_for(int32_t num_blocks, uint64_t bytes_per_block);

class BlockTier final : public Tier {
 public:
  // With what `store` recovers. `sink` (may be null) outlives the result.
  static Result<std::unique_ptr<BlockTier>> create(std::unique_ptr<Store> store, BlockTierOptions options,
                                                   EventSink* sink = nullptr);

  BlockPool& pool() { return *pool_; }
  const BlockPool& pool() const { return *pool_; }
  Store& store() { return *store_; }
  uint64_t bytes_per_block() const { return options_.bytes_per_block; }
  size_t recovered() const;  // found at the start, and not asked for yet
  bool contains(const BlockIdentity& identity) const;
  bool contains(const Digest& hash) const;  // of some block
  // The block, kept; empty: it is not here.
  BlockRef find(const BlockIdentity& identity);

  // What identity the block has that its owner is about to put.
  void claim(int32_t block, const BlockIdentity& identity);
  void remember(int32_t block, const Digest& digest);
  // The block as a chunk, with the digest that was remembered.
  SavedChunk chunk(int32_t block) const;
  // False while it would be useless to put anything (a disk that fails).
  bool accepting() const { return store_->accepting(); }
  // Its bytes are not to be trusted: nobody finds it any more.
  void drop_damaged(const BlockRef& block);

  // Something changed that blocks depend on: nothing of before is found again, after a restart neither. Blocks from now
  // on belong to `space`; none: nobody can name it, so a restart finds none of them. Precondition: no block is on its
  // way here.
  void forget_all(std::optional<Digest> space = {});

  // Tier. chunk->key.index: the block. Bytes for a disk: best at a multiple of 4096.
  std::string_view kind() const override { return store_->traits().kind; }
  bool addressable() const override { return store_->traits().addressable; }
  Status prepare(uint64_t, uint64_t) override { return ok(); }
  Result<std::span<std::byte>> place(SavedChunk& chunk) override;
  std::span<std::byte> view(const SavedChunk& chunk) override;
  void put(std::span<TierPart> parts) override;
  void get(std::span<TierPart> parts) override;
  Status finish() override { return store_->sync(); }

 private:
  struct Block {  // of the pool, as the store knows it
    Slot slot = -1;
    BlockKey key;
    Digest digest;
  };
  struct LiveSegment {
    int32_t number = 0;
    int32_t blocks = 0;  // put into it
  };
  BlockTier(std::unique_ptr<Store> store, std::unique_ptr<BlockPool> pool, BlockTierOptions options);
  Status recover();
  std::vector<Slot> take_slots(size_t count);
  void drop_segment(int32_t number);
  void settle(std::span<TierPart> parts, std::span<StorePart> records, std::vector<SlotRange>& unused);
  Block& at(int32_t block) TORPOR_REQUIRES(mutex_) { return blocks_[static_cast<size_t>(block)]; }
  const Block& at(int32_t block) const TORPOR_REQUIRES(mutex_) { return blocks_[static_cast<size_t>(block)]; }

  const std::unique_ptr<Store> store_;
  const std::unique_ptr<BlockPool> pool_;
  const BlockTierOptions options_;
  const int32_t slots_per_segment_;  // 0: a block's slot is its own number
  const size_t most_segments_;
  struct HashOfDigest {
    size_t operator()(const Digest& digest) const;
  };
  mutable Mutex mutex_;  // never held over a read, a write or a sync
  std::vector<Block> blocks_ TORPOR_GUARDED_BY(mutex_);
  std::unordered_map<Digest, RecoveredSlot, HashOfDigest> recovered_
      TORPOR_GUARDED_BY(mutex_);                                // by the key's first half
  std::deque<LiveSegment> segments_ TORPOR_GUARDED_BY(mutex_);  // oldest first
  Slot next_ TORPOR_GUARDED_BY(mutex_) = 0;
  uint32_t space_ TORPOR_GUARDED_BY(mutex_) = 1;
};

}  // namespace torpor
