// SPDX-License-Identifier: Apache-2.0
// BlockPool: the KV blocks of one tier: their owners, which are shared, which can be reused, and the prefix index.
//
// A block that is being filled has one owner, a MutableBlock. register_block() makes it a shared, immutable block:
// BlockRefs keep it; WeakBlocks name it without keeping it. A registered block without a BlockRef stays in the prefix
// index and can be evicted, in the order of the pool's policy. Blocks without content are taken first.
//
// Several blocks may have one hash, if two requests computed the same prefix at the same time. Each is a block of its
// own; a match returns the oldest. A match compares parent, salt, group and tokens, not only the hash.
//
// Threads: all methods of the pool and of its handles from any thread; one lock. The pool outlives its handles. Events
// are emitted under the lock. Failure: a call that fails changes nothing.
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

// The content of a full block. `parent` is the hash of the block before it; zero for the first.
struct BlockIdentity {
  Digest parent;
  uint64_t salt = 0;  // of the whole sequence: tenants, adapters, …
  int32_t group = 0;  // KV cache group
  std::vector<int32_t> tokens;

  Digest hash() const;  // over all fields
  friend bool operator==(const BlockIdentity&, const BlockIdentity&) = default;
};

// Return the block's key in namespace `space`: its hash, and 128 bits of SHA-256 over the same fields.
BlockKey key_of(const BlockIdentity& identity, uint32_t space);

struct BlockPoolOptions {
  int32_t num_blocks = 0;
  int32_t block_tokens = 16;
  EvictionPolicy eviction = EvictionPolicy::kLru;
  std::function<Digest(const BlockIdentity&)> hash;  // empty: BlockIdentity::hash; tests make collisions with it
};

struct BlockPoolInfo {
  int32_t free = 0;         // in the free queue, cached blocks included
  int32_t cached = 0;       // registered, without a BlockRef
  int32_t shared = 0;       // registered, with a BlockRef
  int32_t owned = 0;        // with a MutableBlock
  int32_t quarantined = 0;  // their owner was destroyed while they were Inflight: never used again
  uint64_t evictions = 0;
  friend bool operator==(const BlockPoolInfo&, const BlockPoolInfo&) = default;
};

// The content of a pool as values, to restore it in another pool of the same shape.
struct BlockPoolSnapshot {
  struct Block {  // a registered block
    int32_t id = -1;
    BlockIdentity identity;
    uint64_t registration = 0;  // differs for each registration of this pool; has no meaning in another
  };
  std::vector<Block> registered;    // by age: of blocks with one hash, the older first
  std::vector<int32_t> free_order;  // as free_order()
};

class BlockPool;

// Keeps a registered block while it exists. Copies share the block.
class BlockRef {
 public:
  BlockRef() = default;
  BlockRef(const BlockRef& other);
  BlockRef(BlockRef&& other) noexcept;
  BlockRef& operator=(BlockRef other) noexcept;
  ~BlockRef();
  explicit operator bool() const { return pool_ != nullptr; }
  int32_t id() const { return id_; }
  // Valid as long as this object. Not while another thread calls BlockPool::rename() for this block.
  const BlockIdentity& identity() const;
  // Keeps the block for ever: a copy that was not proven finished may still read it.
  void never_let_go() { pool_ = nullptr; }

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
  // Return the block; no value if it was evicted, even if its number is in use again.
  std::optional<BlockRef> upgrade() const;
  int32_t id() const { return id_; }
  uint64_t generation() const { return generation_; }  // of the block's slot, when it was named

 private:
  friend class BlockPool;
  WeakBlock(BlockPool& pool, int32_t id, uint64_t generation) : pool_(&pool), id_(id), generation_(generation) {}
  BlockPool* pool_ = nullptr;
  int32_t id_ = -1;
  uint64_t generation_ = 0;
};

// The one owner of a block that is being filled. The destructor resets and frees the block; if it is Inflight, it is
// quarantined. A method that moves the state fails with kFailedPrecondition, which names state and trigger, if
// kvcache/block_state.h does not allow the transition.
class MutableBlock {
 public:
  MutableBlock(MutableBlock&& other) noexcept;
  MutableBlock& operator=(MutableBlock&& other) noexcept;
  ~MutableBlock();
  int32_t id() const { return id_; }
  BlockState state() const;
  int32_t tokens() const;  // number of tokens in it

  Status initialize(const Digest& parent, uint64_t salt, int32_t group = 0);
  // Add as many tokens as fit and return their number. `more_to_come`: the block is not scheduled before more are
  // added.
  Result<int32_t> add_tokens(std::span<const int32_t> tokens, bool more_to_come = false);
  Status schedule_compute();
  Status cancel_schedule();
  Status compute_done();  // -> Complete if the block is full, otherwise -> Partial
  Status reset();         // -> Empty; still owned
  // Complete -> Registered. After success this handle is empty; after a failure it still owns the block.
  Result<BlockRef> register_block();

 private:
  friend class BlockPool;
  MutableBlock() = default;  // owns no block
  MutableBlock(BlockPool& pool, int32_t id) : pool_(&pool), id_(id) {}
  BlockPool* pool_ = nullptr;
  int32_t id_ = -1;
};

// Give an allocated block the content of `identity` and schedule it: it is then Inflight, ready to be written.
Status begin_filling(MutableBlock& block, const BlockIdentity& identity);

class BlockPool final : public DeviceBlocks {
 public:
  // The port gets an event for each block that becomes findable or stops being findable, in order; and, if it asks for
  // them, for each state of each block. kInvalidArgument: invalid options.
  static Result<std::unique_ptr<BlockPool>> create(BlockPoolOptions options, EventPort port = {});

  // Return `count` empty blocks, or none; evict from the front of the free queue. kResourceExhausted names both
  // numbers.
  Result<std::vector<MutableBlock>> allocate(int32_t count);
  // Return the longest run of registered blocks from the beginning of `chain`; each is kept.
  std::vector<BlockRef> match(std::span<const BlockIdentity> chain);
  bool contains(const BlockIdentity& identity) const;
  bool contains(const Digest& hash) const;  // cheaper; does not see collisions
  // Keep and return block `id`; no value if it cannot be found by its content.
  std::optional<BlockRef> ref(int32_t id);
  // Return a WeakBlock for an id and a generation that WeakBlock::generation() returned.
  WeakBlock weak(int32_t id, uint64_t generation) { return {*this, id, generation}; }
  // Make the block unfindable, for upgrades too, because its content is not to be trusted. Existing BlockRefs stay
  // valid.
  void discard(const BlockRef& block);
  // Give the block another identity. It is no longer found under the old one, and existing WeakBlocks no longer
  // upgrade.
  void rename(const BlockRef& block, BlockIdentity identity);
  // Evict those of `blocks` that are cached.
  void evict(const std::vector<int32_t>& blocks);
  // Evict every cached block. Return their number.
  int32_t clear_cached();

  BlockPoolSnapshot snapshot() const;
  // The handles of all blocks that are not free after restore().
  struct Handles {
    Handles() = default;
    Handles(Handles&&) = default;  // move-only: it owns blocks
    Handles& operator=(Handles&&) = default;
    std::map<int32_t, BlockRef> shared;
    std::map<int32_t, MutableBlock> owned;  // empty blocks
  };
  // Make an unused pool equal to `snapshot` (exactly so with LRU). Return handles for all blocks that are not free.
  // After an error the pool is unchanged. kCorruption: the snapshot contradicts itself or this pool's shape.
  // kResourceExhausted: no memory.
  Result<Handles> restore(const BlockPoolSnapshot& snapshot);

  // DeviceBlocks. Each registration of a block gets another version.
  ContentVersion version(int32_t block) const override;
  void hold(std::span<const int32_t> blocks, std::span<const ContentVersion> versions,
            std::span<uint8_t> held) override;
  void release(std::span<const int32_t> blocks) override;

  BlockPoolInfo info() const;
  int32_t block_tokens() const { return options_.block_tokens; }
  int32_t num_blocks() const { return options_.num_blocks; }
  std::vector<int32_t> free_order() const;  // the block that is taken next first
  // Check that slots, counts, index and free queue agree. kInternal names the first contradiction. For tests.
  Status check() const;

 private:
  friend class BlockRef;
  friend class WeakBlock;
  friend class MutableBlock;
  struct Slot {
    BlockState state = BlockState::kEmpty;
    BlockIdentity identity;
    Digest hash;             // valid while registered
    uint64_t age = 0;        // number of the registration
    int32_t references = 0;  // number of BlockRefs
    bool owned = false;      // by a MutableBlock
    bool quarantined = false;
    bool discarded = false;   // registered, but no longer in the index
    bool fresh = false;       // registered, and kept ever since
    uint64_t generation = 0;  // changes with each eviction
    bool is_free = false;     // in empty_ or in cached_
  };

  BlockPool(BlockPoolOptions options, EventPort port);
  Slot& slot(int32_t id) TORPOR_REQUIRES(mutex_) { return slots_[static_cast<size_t>(id)]; }
  const Slot& slot(int32_t id) const TORPOR_REQUIRES(mutex_) { return slots_[static_cast<size_t>(id)]; }
  Status move(int32_t id, BlockTrigger trigger) TORPOR_REQUIRES(mutex_);
  ContentVersion version_of(int32_t id) const TORPOR_REQUIRES(mutex_);
  void empty(int32_t id, DropReason reason) TORPOR_REQUIRES(mutex_);
  void publish_registered(int32_t id) const TORPOR_REQUIRES(mutex_);
  void publish_dropped(int32_t id, DropReason reason) const TORPOR_REQUIRES(mutex_);
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
  BlockList empty_ TORPOR_GUARDED_BY(mutex_);  // free, without content; taken from the front
  std::unique_ptr<EvictionOrder> cached_ TORPOR_GUARDED_BY(mutex_) TORPOR_PT_GUARDED_BY(mutex_);
  int32_t free_blocks_ TORPOR_GUARDED_BY(mutex_) = 0;  // in empty_ and cached_
  // Hash -> registered blocks, oldest first.
  std::unordered_map<Digest, std::vector<int32_t>, DigestHash> index_ TORPOR_GUARDED_BY(mutex_);
  // Counts over all slots.
  int32_t owned_ TORPOR_GUARDED_BY(mutex_) = 0;
  int32_t quarantined_ TORPOR_GUARDED_BY(mutex_) = 0;
  int32_t registered_ TORPOR_GUARDED_BY(mutex_) = 0;
  int32_t shared_ TORPOR_GUARDED_BY(mutex_) = 0;
  uint64_t evictions_ TORPOR_GUARDED_BY(mutex_) = 0;
  uint64_t registrations_ TORPOR_GUARDED_BY(mutex_) = 0;
};

}  // namespace torpor
