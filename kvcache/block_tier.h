// SPDX-License-Identifier: Apache-2.0
// BlockTier: one store, on disk or on another machine, below the host memory of an engine that offloads by itself. The
// engine says which blocks go there and which come back; the tier knows what the store has (BlockIndex), and moves
// bytes between the engine's host memory and the store. If the disk is full, the index chooses the segment to drop.
//
// A job is a list of blocks, each with a result of its own. A stored block is good if the store has it; a loaded block
// is good if its bytes have the digest with which they were stored. A block that cannot be loaded is a miss from then
// on.
//
// The index knows all blocks of a store on disk. A store on another machine is asked: lookup() returns kAsking until
// the store answers, ask() sends all questions since the last call as one, and a request never waits for an answer for
// longer than `most_wait`.
//
// Threads: the methods on one at a time; bytes move on threads of the tier. Loads and questions go before stores, and
// stores never use all threads. Only wait(), forget() and the destructor wait for bytes that move.
#pragma once

#include <chrono>
#include <deque>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "kvcache/block_index.h"
#include "kvcache/disk_slots.h"
#include "offload/slot_store.h"

namespace torpor {

struct BlockTierOptions {
  uint64_t block_bytes = 0;
  int32_t disk_segments = 0;  // of a store on disk, as BlockIndexOptions have them
  int32_t segment_slots = 0;
  int32_t remote_slots = 0;  // of a shared store: most blocks that the index knows to be there
  int32_t remembered_removals = 0;
  int threads = 4;                           // 2 or more
  std::chrono::milliseconds most_wait{100};  // of a lookup
};

enum class TierLookup : uint8_t { kMiss, kHit, kAsking };

// The result of a job.
struct TierJobResult {
  uint64_t job = 0;
  std::vector<bool> good;  // by block: stored, or loaded
  uint64_t bytes = 0;      // that moved
  double seconds = 0;      // since it was submitted
};

class BlockTier {
 public:
  // Open a tier; it adopts the blocks of the namespace that a store on disk has. `clock` outlives it.
  // kInvalidArgument: the options do not fit the store.
  static Result<std::unique_ptr<BlockTier>> create(const BlockTierOptions& options, std::unique_ptr<SlotStore> store,
                                                   const Digest& space, const Clock& clock);
  // Waits for the batches that threads move now; queued batches are dropped.
  ~BlockTier();

  // Look `key` up for `request`. In a store on another machine, a block that was a miss for a request stays a miss for
  // it until it has finished, or until store() has put the block: an engine that heard of a miss goes on without the
  // block. A block that the store lacks stays a miss until each request that looked it up has finished.
  TierLookup lookup(const BlockKey& key, const std::string& request);
  void ask();
  void request_finished(const std::string& request);

  // Begin a job; finished() returns its result. The keys' spaces are ignored. blocks[i] is the memory of keys[i], of
  // block_bytes each, and stays valid until then. Blocks that are there already, or on their way, count as stored.
  Status store(uint64_t job, std::span<const BlockKey> keys, std::span<const std::span<std::byte>> blocks);
  Status load(uint64_t job, const std::string& request, std::span<const BlockKey> keys,
              std::span<const std::span<std::byte>> blocks);
  // Return the jobs that ended since the last call. lookup() knows the answers that have come by then.
  std::vector<TierJobResult> finished();
  // Return when no job is under way and no question is open; finished() returns the results.
  void wait();

  // Wait for all jobs, and forget all blocks; `space` is the namespace from now on.
  Status forget(const Digest& space);
  // Make the stored blocks as durable as the store can.
  Status sync() { return store_->sync(); }

  RemovedBlocks take_removed() { return index_->reports().take_removed(); }
  int64_t blocks() const { return index_->counts(store_id_).visible; }
  int64_t recovered() const { return recovered_; }  // blocks at the start
  StoreHealth health() const { return store_->health(); }
  SlotStore& slot_store() { return *store_; }
  Status check() const { return index_->check(); }

 private:
  struct Block {
    BlockKey key;
    std::span<std::byte> bytes;
    Slot slot = -1;          // of the index; -1: the block is not moved
    StoreSlot store_slot{};  // of the store
    Status status{};
    bool good = false;
  };
  struct TierJob {
    uint64_t id = 0;
    bool load = false;
    std::string request;
    bool request_ended = false;
    std::chrono::nanoseconds begun{};
    std::vector<Block> blocks;
    size_t open = 0;  // batches that are not over; guarded by mutex_
  };
  struct Question {
    std::vector<BlockKey> keys;
    std::vector<bool> there;
  };
  using Questions = std::list<Question>;
  struct Piece {  // of a job: that many of its blocks
    TierJob* job = nullptr;
    size_t first = 0;
    size_t count = 0;
  };
  struct KeyHash {
    size_t operator()(const BlockKey& key) const;
  };
  enum class Answer : uint8_t { kNotAsked, kOpen, kAbsent, kThere };
  struct Asked {
    Answer answer = Answer::kNotAsked;
    std::chrono::nanoseconds since{};                  // it was asked
    std::unordered_map<std::string, bool> requests{};  // that looked it up; true: it is a miss for this one
  };

  BlockTier(const BlockTierOptions& options, std::unique_ptr<SlotStore> store, const Clock& clock);
  Status start(const Digest& space);
  Status recover();
  BlockKey in_space(const BlockKey& key) const;
  Slot slot_of_key(const BlockKey& key) const;
  void drop_segments();
  Status submit(std::unique_ptr<TierJob> job);
  void give_back(const TierJob& job);
  void finish_job(TierJob& job, TierJobResult& result);
  void answered(const Question& question);
  void drop_question(const BlockKey& key);
  bool is_needed(const Asked& asked) const;
  void remember_absent(const BlockKey& key, const std::string& request) noexcept;
  void run();
  bool take(Questions& question, Piece& piece) TORPOR_REQUIRES(mutex_);
  void move(TierJob& job, std::span<Block> blocks);
  void find(Question& question);

  const BlockTierOptions options_;
  const std::unique_ptr<SlotStore> store_;
  const StoreId store_id_;
  const Clock& clock_;
  std::unique_ptr<BlockIndex> index_;
  DiskSlots disk_slots_;
  uint32_t space_ = 1;
  int64_t recovered_ = 0;
  std::unordered_map<BlockKey, Asked, KeyHash> asked_;
  std::unordered_map<std::string, std::unordered_set<BlockKey, KeyHash>> asked_by_;
  std::vector<BlockKey> to_ask_;
  std::vector<TierJobResult> ended_;  // finished, not taken

  mutable Mutex mutex_;  // not held while bytes move
  CondVar work_;
  CondVar idle_;
  Questions questions_ TORPOR_GUARDED_BY(mutex_);
  Questions answers_ TORPOR_GUARDED_BY(mutex_);
  std::deque<Piece> loads_ TORPOR_GUARDED_BY(mutex_);
  std::deque<Piece> stores_ TORPOR_GUARDED_BY(mutex_);
  std::list<std::unique_ptr<TierJob>> jobs_ TORPOR_GUARDED_BY(mutex_);  // under way
  std::list<std::unique_ptr<TierJob>> over_ TORPOR_GUARDED_BY(mutex_);  // not finished
  int running_ TORPOR_GUARDED_BY(mutex_) = 0;                           // pieces and questions
  int storing_ TORPOR_GUARDED_BY(mutex_) = 0;                           // of them
  bool ending_ TORPOR_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;  // last: they use all above
};

}  // namespace torpor
