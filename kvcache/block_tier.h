// SPDX-License-Identifier: Apache-2.0
// BlockTier: one store, on disk or on another machine, below the host memory of an engine that offloads by itself. The
// engine says which blocks go there and which come back; the tier knows what the store has (BlockIndex), and moves
// bytes between the engine's host memory and the store. Which disk segment goes when there is no room is the index's.
//
// A job is a list of blocks. It ends for each block: it is in the store, or in memory as it was stored; or it is not.
// What was read is compared with its digest first; what is not as it was stored, or not there, is a miss from then on.
//
// A store on disk is known by the index. What a store on another machine has is asked: lookup() says kAsking until it
// answers, ask() sends all questions since the last call as one, and a request never waits for an answer for longer
// than `most_wait`.
//
// Threads: the methods on one at a time; bytes move on threads of the tier. Loads and questions go before stores, and
// one thread is never used by stores. Nothing but wait(), forget() and the destructor waits for bytes.
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
  int32_t remote_slots = 0;  // of a shared store: of how many blocks it is remembered that they are there
  int32_t remembered_removals = 0;
  int threads = 4;                           // 2 or more
  std::chrono::milliseconds most_wait{100};  // of a lookup
};

enum class TierLookup : uint8_t { kMiss, kHit, kAsking };

// What became of a job.
struct TierJobResult {
  uint64_t job = 0;
  std::vector<bool> good;  // by block: stored, or loaded
  uint64_t bytes = 0;      // that moved
  double seconds = 0;      // since it was submitted
};

class BlockTier {
 public:
  // Takes over what a store on disk has of the namespace. `clock` outlives it. kInvalidArgument: the options do not fit
  // the store.
  static Result<std::unique_ptr<BlockTier>> create(const BlockTierOptions& options, std::unique_ptr<SlotStore> store,
                                                   const Digest& space, const Clock& clock);
  // What is under way ends; what is not begun is not done.
  ~BlockTier();

  // `request` asks. What one request was told to be absent stays so for it, until request_finished().
  TierLookup lookup(const BlockKey& key, const std::string& request);
  void ask();
  void request_finished(const std::string& request);

  // Begins a job; finished() has its end. The keys' spaces are not read. blocks[i] is the memory of keys[i], of
  // block_bytes each, which stays until then. Blocks that are there already, or on their way, count as stored.
  Status store(uint64_t job, std::span<const BlockKey> keys, std::span<const std::span<std::byte>> blocks);
  Status load(uint64_t job, const std::string& request, std::span<const BlockKey> keys,
              std::span<const std::span<std::byte>> blocks);
  // Jobs that ended since the last call; answers to questions count from here on.
  std::vector<TierJobResult> finished();
  // Returns when no job is under way and no question open. finished() has what ended.
  void wait();

  // Nothing that was stored before is found any more; `space` is the namespace from now on. Waits.
  Status forget(const Digest& space);
  // What was put before is as safe as the store makes it.
  Status sync() { return store_->sync(); }

  RemovedBlocks take_removed() { return index_->take_removed(); }
  int64_t blocks() const { return index_->counts(store_id_).visible; }
  int64_t recovered() const { return recovered_; }  // blocks at the start
  StoreHealth health() const { return store_->health(); }
  SlotStore& slot_store() { return *store_; }
  Status check() const { return index_->check(); }

 private:
  struct Block {
    BlockKey key;
    std::span<std::byte> bytes;
    Slot slot = -1;          // of the index; -1: nothing is to be moved
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
  struct Asked {
    bool open = true;
    std::chrono::nanoseconds since{};
    int requests = 0;
  };

  BlockTier(const BlockTierOptions& options, std::unique_ptr<SlotStore> store, const Clock& clock);
  Status start(const Digest& space);
  Status recover();
  BlockKey in_space(const BlockKey& key) const;
  Slot slot_of_key(const BlockKey& key) const;
  void drop_segments();
  Status submit(std::unique_ptr<TierJob> job);
  void give_back(const TierJob& job);
  void finish_job(TierJob& job);
  void answered(const Question& question);
  void drop_question(const BlockKey& key);
  void remember_absent(const BlockKey& key, const std::string& request);
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
