// SPDX-License-Identifier: Apache-2.0
// OffloadWorker: one rank's part of offloading. It runs the scheduler's plans over this rank's stores and says what
// became of each block; it decides nothing (S4). Where the bytes of a slot lie and what their digest is, each rank
// knows for itself: a slot on disk is a place in the plan's numbers, and gets one in a segment that was never written
// (S5).
//
// Blocks are proven by the transfer engine: what comes down by the end of its copy, what goes up or on by its digest. A
// job ends for all its blocks, one by one (I5, I6); a copy that was not proven over is reported as unproven and its
// memory is never used again (S3).
//
// What the engine gave the device before a plan may still read the blocks that the plan loads into: it is waited for
// (S11). Blocks that are stored are those of steps that are over.
//
// Threads: one at a time, the rank's own; the bytes move on the engine's, which also removes segments' files. What it
// uses outlives it, and so do the jobs of a plan: wait() before the memory of the device goes.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kvcache/kv_layout.h"
#include "kvcache/transfer_plan.h"
#include "offload/slot_store.h"
#include "offload/transfer_engine.h"

namespace torpor {

struct OffloadJob;

struct OffloadWorkerOptions {
  int32_t rank = 0;
  int32_t host_slots = 0;  // as the scheduler's BlockIndexOptions have them; 0: no such store
  int32_t disk_segments = 0;
  int32_t segment_slots = 0;
  int32_t remote_slots = 0;
};

struct LoadedRequest {
  std::string request;
  std::vector<int32_t> bad_blocks;  // of the device: their load failed here
};

class OffloadWorker {
 public:
  // The stores may be null. kInvalidArgument: one is missing, or does not have the options' segments.
  static Result<std::unique_ptr<OffloadWorker>> create(const OffloadWorkerOptions& options, const KvLayout& layout,
                                                       TransferEngine& transfers, std::shared_ptr<SlotStore> host,
                                                       std::unique_ptr<SlotStore> disk,
                                                       std::unique_ptr<SlotStore> remote = nullptr);
  ~OffloadWorker();

  // Keys with this number belong to the namespace with this digest from now on, in the remote store to `shared`; none
  // of before is put any more.
  void open_space(uint32_t space, const Digest& digest, const Digest& shared = {});
  // What the store on disk has of this space and all ranks must agree on; before the first plan, once.
  Result<std::vector<RecoveredBlock>> recover(uint32_t space);
  // What recover() found and is not named here is forgotten.
  void adopt(std::span<const AdoptedBlock> blocks);

  // Begins its jobs, in its order. A plan that was run already changes nothing. kInvalidArgument: it names what this
  // rank does not have. kResourceExhausted: there is no memory to note its jobs; it can be run again. Nothing of it is
  // done then. Otherwise each job of it ends with an outcome for each block.
  Status run(const TransferPlan& plan);
  // What ended and was not reported; empty: nothing did, or there is no memory to say so yet.
  TransferReport poll();
  // Requests of which all loads have been reported by poll(), since the last call.
  std::vector<LoadedRequest> take_loaded() { return std::exchange(loaded_, {}); }
  // Returns when nothing of a plan is under way; the next poll() has all of it.
  void wait() { (void)transfers_.drain(); }
  bool idle() const { return running_.empty() && refused_.empty(); }
  SlotStore* store(StoreId id) const {
    return id == StoreId::kHost ? host_.get() : id == StoreId::kDisk ? disk_.get() : remote_.get();
  }

 private:
  using RunningJobs = std::list<std::unique_ptr<OffloadJob>>;
  using RunningJob = RunningJobs::iterator;
  static constexpr int64_t kNoSegment = -1;

  OffloadWorker(const OffloadWorkerOptions& options, const KvLayout& layout, TransferEngine& transfers,
                std::shared_ptr<SlotStore> host, std::unique_ptr<SlotStore> disk, std::unique_ptr<SlotStore> remote);
  Status check(const TransferPlan& plan) const;
  struct Noted;
  Noted note(const TransferPlan& plan) const;
  void take(Noted& noted) noexcept;
  void drop(std::span<const Dropped> dropped, Noted& noted);
  void begin(RunningJob job, std::span<const BlockKey> keys, const Status& ordered);
  Job make_job(std::span<const BlockKey> keys, OffloadJob& running);
  StoreSlot slot_to_read(StoreId store, Slot slot) const;
  StoreSlot slot_to_write(StoreId store, Slot slot);
  bool tell(OffloadJob& running, const JobResult& result, TransferReport& report);
  bool tell_refused(OffloadJob& running, TransferReport& report);
  BlockOutcome outcome_of(const OffloadJob& running, size_t i, const ChunkTransfer& chunk);
  void make_room(uint64_t job, size_t bad_blocks);
  void load_ended(uint64_t job, std::span<const int32_t> bad_blocks) noexcept;
  void report_stores(TransferReport& report);
  int64_t slots_of(StoreId store) const;

  const OffloadWorkerOptions options_;
  const KvLayout& layout_;
  TransferEngine& transfers_;
  const std::shared_ptr<SlotStore> host_;  // a sleep may keep it too
  const std::unique_ptr<SlotStore> disk_;
  const std::unique_ptr<SlotStore> remote_;
  const uint64_t block_bytes_;
  std::vector<Digest> host_digests_;      // by slot
  std::vector<StoreSlot> disk_slots_;     // by slot of the plans; -1: nothing was put there
  std::vector<int64_t> segments_;         // of the store, by segment of the plans; kNoSegment: not begun
  std::map<int64_t, int32_t> adopted_;    // slots that plans know, by the store's recovered segment
  std::vector<RecoveredSlot> recovered_;  // until adopt()
  int64_t next_segment_ = 0;
  uint64_t last_plan_ = 0;
  std::map<JobId, std::unique_ptr<OffloadJob>> running_;
  RunningJobs refused_;           // that the engine did not take
  std::vector<JobResult> ended_;  // not reported yet
  struct Loading {
    LoadedRequest ended;
    size_t jobs = 0;  // not over
  };
  std::map<std::string, Loading> loading_;
  std::multimap<uint64_t, std::string> loads_of_;  // requests by job
  std::vector<LoadedRequest> loaded_;
  std::array<bool, kStores> accepting_{true, true, true};  // as last reported
};

}  // namespace torpor
