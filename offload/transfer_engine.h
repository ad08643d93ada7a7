// SPDX-License-Identifier: Apache-2.0
// TransferEngine: the one way in which bytes leave device memory and come back. It lives as long as its rank.
//
// A job (offload/transfer_job.h) is a list of chunks on their way into a store or out of it. Jobs wait in lanes
// (offload/lane.h), one for stores in memory, one for those that are not, and one for those of other machines, each
// with threads of its own, so that a slow disk holds up no copy in memory, and a slow network neither. A thread has two
// batches under way at once (offload/batch_copier.h): while one is written, or read and checked, the copies of the
// other run.
//
// Each chunk ends with one counted outcome (I6), and only as kTransferred where its copy was proven (I2). The failure
// of one never marks another (I5). After a copy that is not proven over, usable() says so for ever: its memory is kept,
// nothing more is copied, and no memory of the device may be unmapped (I3).
//
// Threads: all methods from any. They are started once, by create(), and end with the engine; whatever is thrown on
// one fails the batch that it works on. With own_threads off nothing moves but in pump(), wait() and drain(), on the
// thread that calls them, in one order: for simulations that must replay exactly.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "allocator/device_memory.h"
#include "allocator/host_arena.h"
#include "base/event.h"
#include "base/mutex.h"
#include "base/status.h"
#include "offload/batch_copier.h"
#include "offload/lane.h"
#include "offload/transfer_job.h"

namespace torpor {

struct TransferEngineOptions {
  int threads = 0;  // of each lane, at most kMostThreads; 0: as many as the machine has cores, at most 8
  static constexpr int kMostThreads = 256;
  int32_t queued_jobs = 256;  // most that wait in each lane
  bool own_threads = true;
  EventPort events{};  // each batch: begins, and how it ended
};

class TransferEngine {
 public:
  // `device` and `arena` outlive the result. kResourceExhausted where a thread cannot be had.
  static Result<std::unique_ptr<TransferEngine>> create(DeviceMemory& device, HostArena& arena,
                                                        TransferEngineOptions options = {});
  // Batches under way are finished; what is not begun ends as kShutDown. Nobody may be waiting.
  ~TransferEngine();

  // Starts the threads of the lane of other machines; without it jobs for their stores are refused. Again: nothing.
  // kResourceExhausted where a thread cannot be had.
  Status open_remote_lane();

  // Never blocks. Refused, and nothing of it is kept: kResourceExhausted names the lane that is full, kDevice after an
  // unproven copy.
  Result<JobId> submit(Job job);
  // Returns when nothing of the job is running any more, or after kUnproven. The result is taken: once. kNotFound for a
  // job that is not there.
  JobResult wait(JobId id);
  // Adds the results of `polled` jobs that have ended; how many. Never blocks.
  size_t poll(std::vector<JobResult>& finished);
  // What of the job is not begun ends as kCancelled. True: that is all of it, no byte moved. Its result is there all
  // the same.
  bool cancel(JobId id);
  // Returns when no job waits or is under way: how the copies since the last call ended, the worst of them.
  DrainResult drain();
  // Without own_threads: moves one batch. Whether there was one.
  bool pump();
  Status usable() const;  // kDevice after an unproven copy
  bool quarantined() const { return quarantined_; }
  // Returns when all is over that the device was given before, by whomever: what the engine computes, too.
  Status wait_for_device() { return device_.synchronize(); }

  // One job each, all or nothing, waited for. Plans and store stay until then.
  //
  // Makes room in `target`, copies all chunks into it and finishes it. After an error the store's content is void.
  Result<std::vector<SavedChunk>> save(std::span<const ChunkPlan> plans, RecordStore& target);
  // Copies every chunk of `saved` (same keys, same order as `plans`) up. kCorruption names the first chunk whose digest
  // is wrong; the device's bytes are void then.
  Status restore(std::span<const SavedChunk> saved, std::span<const ChunkPlan> plans, RecordStore& source);
  // Parts of a save or a restore, that run while who asked does something else. What was begun must be ended, also
  // after an error; plans and store stay until then. begin_save() neither makes the store ready nor finishes it.
  Result<JobId> begin_save(std::span<const ChunkPlan> plans, RecordStore& target);
  Result<std::vector<SavedChunk>> end_save(JobId part);
  Result<JobId> begin_restore(std::span<const SavedChunk> saved, std::span<const ChunkPlan> plans, RecordStore& source);
  Status end_restore(JobId part);
  // Of what is in device memory now.
  Result<std::vector<Digest>> digests(std::span<const ChunkPlan> plans);
  // The same in the background, behind all that is more urgent: `target` is neither made ready nor finished, and nobody
  // is told. For a part of what goes into it.
  Result<std::vector<SavedChunk>> put(std::span<const ChunkPlan> plans, RecordStore& target);
  // Move chunks from `source`, a store in memory: `saved` says where they are there, and afterwards where in `target`.
  Status move(std::span<const ChunkPlan> plans, std::span<SavedChunk> saved, RecordStore& source, RecordStore& target);
  // Is told of save(), restore() and digests() from now on, and may cancel them: then they fail with kAborted. Null:
  // nobody is.
  void watch(std::shared_ptr<ProgressFile> progress);

  OutcomeCounts counts() const;             // of the chunks of all jobs that ever ended
  int threads() const { return threads_; }  // of each lane
  bool own_threads() const { return own_threads_; }
  // Gives staging memory that no batch uses back to the arena, but for what is kept.
  void release_staging();
  // From now on each thread for stores in memory keeps staging memory for batches of up to so many bytes, each chunk in
  // pages: a store there that is not addressable can then be read however full the arena is. Waits for what they copy
  // now. kResourceExhausted: there is no room for it.
  Status keep_staging(uint64_t batch_bytes);
  uint64_t kept_staging() const;  // of each batch
  void let_staging_go();          // of threads that copy nothing now
  // Most that a batch needs of chunks that have so many bytes in all, and in pages so many, the largest one too.
  static uint64_t most_staging(uint64_t bytes, uint64_t padded_bytes, uint64_t largest_padded);
  uint64_t memory_batches() const { return 2 * static_cast<uint64_t>(own_threads_ ? threads_ : 1); }  // at once

 private:
  enum LaneNumber : size_t { kMemory, kDisk, kRemote, kLanes };
  struct Worker {
    LaneNumber lane = kMemory;
    bool busy = false;                    // guarded by mutex_
    std::unique_ptr<BatchCopier> copier;  // the worker's alone while it is busy
    std::thread thread;
  };
  TransferEngine(DeviceMemory& device, HostArena& arena, int threads, const TransferEngineOptions& options);
  Status start(LaneNumber lane, int threads);
  void work(Worker& worker);
  bool pump_one() TORPOR_REQUIRES(mutex_);  // gives the lock back while bytes move
  Result<JobId> submit_watched(Job job);
  Result<std::vector<ChunkTransfer>> wait_watched(JobId id);
  Result<std::vector<ChunkTransfer>> submit_and_wait(Job job);
  Result<std::vector<ChunkTransfer>> do_in_background(Job job);
  void tell_begun(const Batch& batch) const noexcept;
  void record_result(const Batch& batch, int64_t began, DrainResult drained) noexcept TORPOR_REQUIRES(mutex_);
  void drop(JobRecord& record, BlockOutcome outcome) noexcept TORPOR_REQUIRES(mutex_);
  static LaneNumber lane_of(const Job& job) {
    if (job.store == nullptr || job.store->traits().in_memory) return kMemory;
    return job.store->traits().shared ? kRemote : kDisk;
  }
  void wait_until_idle(const Worker& worker) TORPOR_REQUIRES(mutex_);
  static JobResult result_of(JobRecord& record) noexcept;

  DeviceMemory& device_;
  HostArena& arena_;
  const int threads_;
  const bool own_threads_;
  const EventPort port_;
  std::atomic<bool> quarantined_ = false;
  mutable Mutex mutex_;  // not held while bytes move
  std::array<CondVar, kLanes> work_;
  CondVar ended_;  // a job, a batch, or what a worker had to do
  std::array<Lane, kLanes> lanes_ TORPOR_GUARDED_BY(mutex_);
  std::map<JobId, JobRecord> jobs_ TORPOR_GUARDED_BY(mutex_);
  size_t open_ TORPOR_GUARDED_BY(mutex_) = 0;  // of them: not finished
  uint64_t last_id_ TORPOR_GUARDED_BY(mutex_) = 0;
  OutcomeCounts counts_ TORPOR_GUARDED_BY(mutex_){};
  DrainResult worst_ TORPOR_GUARDED_BY(mutex_);
  std::shared_ptr<ProgressFile> progress_ TORPOR_GUARDED_BY(mutex_);  // of watch()
  int waiting_for_idle_ TORPOR_GUARDED_BY(mutex_) = 0;
  bool ending_ TORPOR_GUARDED_BY(mutex_) = false;
  bool remote_lane_ TORPOR_GUARDED_BY(mutex_) = false;
  std::vector<std::unique_ptr<Worker>>
      workers_;  // changed with mutex_ held, and by one thread; last: their threads use all above
};

}  // namespace torpor
