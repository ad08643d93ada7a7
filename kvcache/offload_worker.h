// SPDX-License-Identifier: Apache-2.0
// OffloadWorker: one rank's part of offloading. It runs the scheduler's plans over this rank's stores and reports the
// outcome of each block; it decides nothing (S4). Each rank knows for itself where a slot's bytes lie and what their
// digest is: a disk slot of a plan is mapped to a slot of a segment that was never written (S5).
//
// The transfer engine proves the blocks: offloaded ones by the end of their copy, loaded or moved ones by their digest.
// A job ends for each of its blocks separately (I5, I6). A copy that is not proven finished is reported as unproven,
// and its memory is never used again (S3).
//
// Work that the engine gave the device before a plan may still read or write the blocks that the plan loads into, so
// the thread that copies waits for it (S11); run() does not. Blocks are stored only after their step is over.
//
// Threads: one at a time, the rank's own. Bytes move on the transfer engine's threads, which also remove segments'
// files. `layout` and `transfers` outlive this object. Jobs run on after run() returned: call wait() before device
// memory is freed. The destructor waits too.
#pragma once

#include <chrono>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kvcache/disk_slots.h"
#include "kvcache/kv_layout.h"
#include "kvcache/transfer_plan.h"
#include "offload/slot_store.h"
#include "offload/transfer_engine.h"

namespace torpor {

struct OffloadJob;

// The scheduler's BlockIndexOptions have the same sizes; 0: the store does not exist.
struct OffloadWorkerOptions {
  int32_t rank = 0;
  int32_t host_slots = 0;
  int32_t disk_segments = 0;
  int32_t segment_slots = 0;
  int32_t remote_slots = 0;
};

struct LoadedRequest {
  std::string request;
  std::vector<int32_t> bad_blocks;  // device blocks whose load failed on this rank
};

class OffloadWorker {
 public:
  // `layout` and `transfers` outlive the result. A store may be null. kInvalidArgument: a store is missing, or does not
  // match the options.
  static Result<std::unique_ptr<OffloadWorker>> create(const OffloadWorkerOptions& options, const KvLayout& layout,
                                                       TransferEngine& transfers, std::shared_ptr<SlotStore> host,
                                                       std::unique_ptr<SlotStore> disk,
                                                       std::unique_ptr<SlotStore> remote = nullptr);
  ~OffloadWorker();

  // Open a namespace: keys with this number belong to `digest`, in the remote store to `shared`. Blocks of earlier
  // namespaces are no longer put.
  void open_space(uint32_t space, const Digest& digest, const Digest& shared = {});
  // Return what the disk store has of this namespace, for the agreement of all ranks. Call once, before the first plan.
  Result<std::vector<RecoveredBlock>> recover(uint32_t space);
  // Forget the recovered blocks that are not in `blocks`.
  void adopt(std::span<const AdoptedBlock> blocks);

  // Start the jobs of a plan, in order. A plan that was run before changes nothing. After an error nothing of the plan
  // is done: kInvalidArgument: it names a block or slot that this rank does not have; kResourceExhausted: there is no
  // memory to note its jobs, and it can be run again. After success each of its jobs ends with an outcome for each
  // block.
  Status run(const TransferPlan& plan);
  // Return what ended and was not reported yet. If memory runs out, a later call reports the rest.
  TransferReport poll();
  // Return the requests whose loads poll() has reported completely since the last call.
  std::vector<LoadedRequest> take_loaded() { return std::exchange(loaded_, {}); }
  // Wait until the loads of these requests have ended; the next poll() reports them. Call it after run().
  Status finish_loads(std::span<const std::string> requests);
  // Wait until poll() has something to report, at most this long. Return whether it has.
  bool wait_for_report(std::chrono::nanoseconds most);
  // Wait until nothing of a plan is under way; the next poll() reports all of it.
  void wait() { (void)transfers_.drain(); }
  bool idle() const { return running_.empty() && refused_.empty(); }
  SlotStore* store(StoreId id) const {
    return id == StoreId::kHost ? host_.get() : id == StoreId::kDisk ? disk_.get() : remote_.get();
  }

 private:
  using RunningJobs = std::list<std::unique_ptr<OffloadJob>>;
  using RunningJob = RunningJobs::iterator;

  OffloadWorker(const OffloadWorkerOptions& options, const KvLayout& layout, TransferEngine& transfers,
                std::shared_ptr<SlotStore> host, std::unique_ptr<SlotStore> disk, std::unique_ptr<SlotStore> remote);
  Status check(const TransferPlan& plan) const;
  struct Noted;
  Noted note(const TransferPlan& plan) const;
  void take(Noted& noted) noexcept;
  void drop(std::span<const Dropped> dropped, Noted& noted);
  void begin(RunningJob job, std::span<const BlockKey> keys, const std::shared_ptr<EarlierWork>& earlier);
  Job make_job(std::span<const BlockKey> keys, OffloadJob& running);
  StoreSlot slot_to_read(StoreId store, Slot slot) const;
  StoreSlot slot_to_write(StoreId store, Slot slot);
  bool report_job(OffloadJob& running, const JobResult& result, TransferReport& report);
  bool report_refused(OffloadJob& running, TransferReport& report);
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
  DiskSlots disk_slots_;                  // of the plans' slots
  std::vector<RecoveredSlot> recovered_;  // until adopt()
  uint64_t last_plan_ = 0;
  std::map<JobId, std::unique_ptr<OffloadJob>> running_;
  RunningJobs refused_;           // not accepted by the transfer engine
  std::vector<JobResult> ended_;  // not reported yet
  struct Loading {
    LoadedRequest ended;
    size_t jobs = 0;  // not ended
  };
  std::map<std::string, Loading> loading_;
  std::multimap<uint64_t, std::string> loads_of_;  // requests by job
  std::vector<LoadedRequest> loaded_;
  std::array<bool, kStores> accepting_{true, true, true};  // as last reported
};

}  // namespace torpor
