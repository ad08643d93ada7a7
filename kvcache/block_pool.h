// SPDX-License-Identifier: Apache-2.0
// BlockPool: the KV blocks of one tier: who owns which, which are shared, which may be taken again, and the prefix
// index.
//
// A block that is being filled has one owner, a MutableBlock. register_block() turns it into a shared, immutable one:
// BlockRefs keep it; WeakBlocks name it without keeping it. A registered block without a BlockRef stays in the prefix
// index and may be evicted, in the order of the pool's policy; blocks without content are taken before any other.
//
// Several blocks may carry one hash (two requests computed the same prefix at the same time); each is its own block, a
// match returns the oldest. A hit compares what it claims (parent, salt, group, tokens), not only the hash.
//
// Threads: all methods of the pool and of its handles from any thread; one lock. The pool outlives its handles.
// Failure: a call that fails changes nothing. Events are told under the lock.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/digest.h"
#include "base/event.h"
#include "base/mutex.h"
#include "base/status.h"
#include "kvcache/block_list.h"
#include "kvcache/block_state.h"
#include "kvcache/device_blocks.h"
#include "kvcache/eviction_order.h"

namespace torpor {

// What a full block holds. Chained: `parent` is the hash of the block before it, zero for the first.
struct BlockIdentity {
  Digest parent;
  uint64_t salt = 0;  // of the whole sequence: tenants, adapters, …
  int32_t group = 0;  // KV cache group
  std::vector<int32_t> tokens;

  Digest hash() const;  // over all fields
  friend bool operator==(const BlockIdentity&, const BlockIdentity&) = default;
};

// Its key in a namespace: its hash, and 128 bits of SHA-256 over the same fields.
BlockKey key_of(const BlockIdentity& identity, uint32_t space);

struct BlockPoolOptions {
  int32_t num_blocks = 0;
  int32_t block_tokens = 16;
  EvictionPolicy eviction = EvictionPolicy::kLru;
  std::function<Digest(const BlockIdentity&)> hash;  // empty: BlockIdentity::hash; tests put collisions here
};

struct BlockPoolInfo {
  int32_t free = 0;         // in the free queue, cached ones included
  int32_t cached = 0;       // registered, without a BlockRef
  int32_t shared = 0;       // registered, with one
  int32_t owned = 0;        // with a MutableBlock
  int32_t quarantined = 0;  // their owner went while they were Inflight: never used again
  uint64_t evictions = 0;
  friend bool operator==(const BlockPoolInfo&, const BlockPoolInfo&) = default;
};

// What a pool holds, as values: to put it into another pool of the same shape.
struct BlockPoolSnapshot {
  struct Block {  // a registered one
    int32_t id = -1;
    BlockIdentity identity;
    uint64_t registration = 0;  // another one for each registration of this pool; of no meaning to another
  };
  std::vector<Block> registered;    // by age: of two with one hash the older first
  std::vector<int32_t> free_order;  // as free_order()
};

class BlockPool;

// A registered block, kept for as long as this exists. Copies share it.
class BlockRef {
 public:
  BlockRef() = default;
  BlockRef(const BlockRef& other);
  BlockRef(BlockRef&& other) noexcept;
  BlockRef& operator=(BlockRef other) noexcept;
  ~BlockRef();
  explicit operator bool() const { return pool_ != nullptr; }
  int32_t id() const { return id_; }
  const BlockIdentity& identity() const;    // valid as long as this
  void never_let_go() { pool_ = nullptr; }  // a copy that was never proven over may still read the block

 private:
  friend class BlockPool;
  friend class WeakBlock;
  friend class MutableBlock;
  BlockRef(BlockPool& pool, int32_t id) : pool_(&pool), id_(id) {}
  BlockPool* pool_ = nullptr;
  int32_t id_ = -1;
};

// Names a registered block without keeping it.
class WeakBlock {
 public:
  WeakBlock() = default;
  explicit WeakBlock(const BlockRef& block);
  // The block, or nothing if it was evicted meanwhile, even if its slot is in use again.
  std::optional<BlockRef> upgrade() const;
  int32_t id() const { return id_; }
  uint64_t generation() const { return generation_; }  // of its slot, when it was named

 private:
  friend class BlockPool;
  WeakBlock(BlockPool& pool, int32_t id, uint64_t generation) : pool_(&pool), id_(id), generation_(generation) {}
  BlockPool* pool_ = nullptr;
  int32_t id_ = -1;
  uint64_t generation_ = 0;
};

// The one owner of a block that is being filled. Destroyed: the block is reset and free; while Inflight it is
// quarantined. Each method that moves the state is kFailedPrecondition, naming both, where the table does not allow it.
class MutableBlock {
 public:
  MutableBlock(MutableBlock&& other) noexcept;
  MutableBlock& operator=(MutableBlock&& other) noexcept;
  ~MutableBlock();
  int32_t id() const { return id_; }
  BlockState state() const;
  int32_t tokens() const;  // how many it has

  Status initialize(const Digest& parent, uint64_t salt, int32_t group = 0);
  // Adds as many as fit and returns how many. `more_to_come`: it is not scheduled before others were added.
  Result<int32_t> add_tokens(std::span<const int32_t> tokens, bool more_to_come = false);
  Status schedule_compute();
  Status cancel_schedule();
  Status compute_done();  // -> Complete if the block is full, otherwise -> Partial
  Status reset();         // -> Empty; still owned
  // Complete -> Registered. On success this handle is empty; on failure it still owns the block.
  Result<BlockRef> register_block();

 private:
  friend class BlockPool;
  MutableBlock() = default;  // of no block
  MutableBlock(BlockPool& pool, int32_t id) : pool_(&pool), id_(id) {}
  BlockPool* pool_ = nullptr;
  int32_t id_ = -1;
};

// Makes an allocated block hold what `identity` says, ready to be written.
Status begin_filling(MutableBlock& block, const BlockIdentity& identity);

class BlockPool final : public DeviceBlocks {
 public:
  // The port is told of what becomes findable and what is no longer, in order; and, if it asks for that, of each state
  // of each block.
  static Result<std::unique_ptr<BlockPool>> create(BlockPoolOptions options, EventPort port = {});

  // `count` empty blocks, evicting from the front of the free queue; all or none. kResourceExhausted has both numbers.
  Result<std::vector<MutableBlock>> allocate(int32_t count);
  // The longest run of registered blocks for `chain`, first block first; each is kept.
  std::vector<BlockRef> match(std::span<const BlockIdentity> chain);
  bool contains(const BlockIdentity& identity) const;
  bool contains(const Digest& hash) const;  // of some block; cheaper, and blind to collisions
  // The block of this number, kept from now on, if it can be found by its content.
  std::optional<BlockRef> ref(int32_t id);
  // The block that was named so, if it is still there when it is upgraded.
  WeakBlock weak(int32_t id, uint64_t generation) { return {*this, id, generation}; }
  // Its content is not to be trusted: nobody finds or upgrades it any more. Those who keep it go on keeping it.
  void discard(const BlockRef& block);
  // From now on it is found under this identity, and under its old one no more; those who named it do not find it
  // again.
  void rename(const BlockRef& block, BlockIdentity identity);
  // Evicts those of `blocks` that are cached.
  void evict(const std::vector<int32_t>& blocks);
  // Evicts every cached block. Returns how many.
  int32_t clear_cached();

  BlockPoolSnapshot snapshot() const;
  // Makes an unused pool what `snapshot` says (exactly so with LRU), with everything that is not free in the caller's
  // hands. kCorruption where the snapshot contradicts itself or this pool's shape, kResourceExhausted for want of
  // memory; the pool is unchanged then.
  struct Handles {
    Handles() = default;
    Handles(Handles&&) = default;  // and not to be copied: it owns
    Handles& operator=(Handles&&) = default;
    std::map<int32_t, BlockRef> shared;
    std::map<int32_t, MutableBlock> owned;  // empty blocks
  };
  Result<Handles> restore(const BlockPoolSnapshot& snapshot);

  // DeviceBlocks. Another version for each registration.
  ContentVersion version(int32_t block) const override;
  void hold(std::span<const int32_t> blocks, std::span<const ContentVersion> versions,
            std::span<uint8_t> held) override;
  void release(std::span<const int32_t> blocks) override;

  BlockPoolInfo info() const;
  int32_t block_tokens() const { return options_.block_tokens; }
  int32_t num_blocks() const { return options_.num_blocks; }
  std::vector<int32_t> free_order() const;  // the next to be taken first
  // Slots, counts, index and free queue agree. kInternal with the first contradiction; for tests.
  Status check() const;

 private:
  friend class BlockRef;
  friend class WeakBlock;
  friend class MutableBlock;
  struct Slot {
    BlockState state = BlockState::kEmpty;
    BlockIdentity identity;
    Digest hash;             // meaningful while registered
    uint64_t age = 0;        // of the registration
    int32_t references = 0;  // BlockRefs
    bool owned = false;      // by a MutableBlock
    bool quarantined = false;
    bool discarded = false;   // registered, but no longer in the index
    bool fresh = false;       // registered, and never let go of since
    uint64_t generation = 0;  // another one after each eviction
    bool is_free = false;     // in empty_ or in cached_
  };
  struct DigestHash {
    size_t operator()(const Digest& digest) const;
  };

  BlockPool(BlockPoolOptions options, EventPort port);
  Slot& slot(int32_t id) TORPOR_REQUIRES(mutex_) { return slots_[static_cast<size_t>(id)]; }
  const Slot& slot(int32_t id) const TORPOR_REQUIRES(mutex_) { return slots_[static_cast<size_t>(id)]; }
  Status move(int32_t id, BlockTrigger trigger) TORPOR_REQUIRES(mutex_);
  ContentVersion version_of(int32_t id) const TORPOR_REQUIRES(mutex_);
  void empty(int32_t id, DropReason reason) TORPOR_REQUIRES(mutex_);
  void tell_registered(int32_t id) const TORPOR_REQUIRES(mutex_);
  void tell_dropped(int32_t id, DropReason reason) const TORPOR_REQUIRES(mutex_);
  void take_out_of_index(int32_t id) TORPOR_REQUIRES(mutex_);
  void add_to_free(int32_t id) TORPOR_REQUIRES(mutex_);
  int32_t take_free() TORPOR_REQUIRES(mutex_);
  void make_registered(int32_t id) TORPOR_REQUIRES(mutex_);
  void keep(int32_t id) TORPOR_REQUIRES(mutex_);
  void drop_reference(int32_t id) TORPOR_REQUIRES(mutex_);
  void end_ownership(int32_t id) TORPOR_REQUIRES(mutex_);
  std::optional<int32_t> find(const BlockIdentity& identity) const TORPOR_REQUIRES(mutex_);
  std::vector<int32_t> free_order_locked() const TORPOR_REQUIRES(mutex_);
  void fill(const BlockPoolSnapshot& snapshot) TORPOR_REQUIRES(mutex_);
  Result<Handles> restore_now(const BlockPoolSnapshot& snapshot);

  const BlockPoolOptions options_;
  const EventPort port_;
  mutable Mutex mutex_;
  std::vector<Slot> slots_ TORPOR_GUARDED_BY(mutex_);
  BlockList empty_ TORPOR_GUARDED_BY(mutex_);  // free, without content; the front is taken first
  std::unique_ptr<EvictionOrder> cached_ TORPOR_GUARDED_BY(mutex_) TORPOR_PT_GUARDED_BY(mutex_);
  int32_t free_blocks_ TORPOR_GUARDED_BY(mutex_) = 0;  // in both
  // Hash -> registered blocks, oldest first.
  std::unordered_map<Digest, std::vector<int32_t>, DigestHash> index_ TORPOR_GUARDED_BY(mutex_);
  // What a walk over the slots would count.
  int32_t owned_ TORPOR_GUARDED_BY(mutex_) = 0;
  int32_t quarantined_ TORPOR_GUARDED_BY(mutex_) = 0;
  int32_t registered_ TORPOR_GUARDED_BY(mutex_) = 0;
  int32_t shared_ TORPOR_GUARDED_BY(mutex_) = 0;
  uint64_t evictions_ TORPOR_GUARDED_BY(mutex_) = 0;
  uint64_t registrations_ TORPOR_GUARDED_BY(mutex_) = 0;
};

}  // namespace torpor
