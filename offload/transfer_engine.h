// SPDX-License-Identifier: Apache-2.0
// TransferEngine: moves all bytes between device memory and stores. It lives as long as its rank.
//
// A job (offload/transfer_job.h) is a list of chunks that go into a store or come from one. Jobs wait in lanes
// (offload/lane.h): one for stores in memory, one for disks, one for stores on other machines. Each lane has threads of
// its own, so a slow disk or network delays no copy in memory. A thread has two batches under way
// (offload/batch_copier.h): while it writes one, or reads and checks it, the copies of the other run.
//
// Each chunk ends with one counted outcome (I6): kTransferred only if its copy was proven (I2). A failed chunk marks no
// other (I5). After a copy that is not proven finished, usable() is an error until the process ends: the memory of the
// copy is kept, nothing more is copied, and no device memory may be unmapped (I3).
//
// Threads: all methods from any thread. create() starts the engine's threads; they end with the engine. An exception on
// one of them fails its batch. Without own_threads, bytes move only in pump(), wait() and drain(), on the calling
// thread and in one order: for simulations that must replay exactly.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
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
  // Threads of each lane, at most kMostThreads. 0: one for each core of the machine, at most 8.
  int threads = 0;
  static constexpr int kMostThreads = 256;
  int32_t queued_jobs = 256;  // most that wait in each lane
  bool own_threads = true;
  EventPort events{};  // for each batch: its begin and its result
};

class TransferEngine {
 public:
  // `device` and `arena` outlive the result. kInvalidArgument: options out of range. kResourceExhausted: a thread
  // cannot be started.
  static Result<std::unique_ptr<TransferEngine>> create(DeviceMemory& device, HostArena& arena,
                                                        TransferEngineOptions options = {});
  // Finish the batches under way; end the chunks that are not begun as kShutDown. Precondition: no thread is in a
  // method.
  ~TransferEngine();

  // Start the threads of the lane for other machines. Jobs for their stores need it. A second call does nothing.
  // kResourceExhausted: a thread cannot be started.
  Status open_remote_lane();

  // Queue a job. Never blocks. After an error nothing of the job is kept. kResourceExhausted names the lane that is
  // full; kDevice: an earlier copy is not proven finished; kInvalidArgument or kFailedPrecondition: a mistake of the
  // caller.
  Result<JobId> submit(Job job);
  // Wait until nothing of the job is running, or a copy of it is unproven. Return the job's result, once: a second call
  // returns kNotFound, as for an unknown job.
  JobResult wait(JobId id);
  // Append the results of finished jobs that have `polled` set. Return their number. Never blocks. Without memory it
  // appends nothing, and a later call returns them.
  size_t poll(std::vector<JobResult>& finished);
  // Wait until poll() has a result, at most this long. Return whether it has. Without own_threads batches are moved
  // until it has one, and nothing is waited for.
  bool wait_for_result(std::chrono::nanoseconds most);
  // Wait until none of these jobs is queued or under way. Their results stay for poll().
  void wait_ended(std::span<const JobId> jobs);
  // End the chunks of the job that are not begun as kCancelled. Return true if no chunk was begun, so no byte moved.
  // The result is still to be taken with wait() or poll().
  bool cancel(JobId id);
  // Wait until no job is queued or under way; `of_device`: none that uses the device. Return the worst result of the
  // copies since the last call.
  DrainResult drain(bool of_device = false);
  // Without own_threads: move one batch. Return false if there was none.
  bool pump();
  Status usable() const;  // kDevice after an unproven copy
  bool quarantined() const { return quarantined_; }
  // Wait for all work that anyone gave the device before, including the engine's computation.
  Status wait_for_device() { return device_.synchronize(); }

  OutcomeCounts counts() const;             // chunks of all finished jobs, by outcome
  int threads() const { return threads_; }  // in each lane
  bool own_threads() const { return own_threads_; }
  // Give staging memory that no batch uses back to the arena, except what keep_staging() reserved.
  void release_staging();
  // Reserve staging memory in each thread for stores in memory: for batches of up to `batch_bytes` bytes, each chunk in
  // whole pages. A store in memory that is not addressable can then be read even if the arena is full. Waits for the
  // batches under way. kResourceExhausted: the arena has no space for it.
  Status keep_staging(uint64_t batch_bytes);
  uint64_t kept_staging() const;  // bytes, for each batch
  void let_staging_go();          // gives it back for threads that copy nothing now
  // Return the most staging memory, in bytes, that a batch needs, for chunks of `bytes` bytes in all, `padded_bytes` in
  // whole pages, the largest of which takes `largest_padded`.
  static uint64_t most_staging(uint64_t bytes, uint64_t padded_bytes, uint64_t largest_padded);
  uint64_t memory_batches() const { return 2 * static_cast<uint64_t>(own_threads_ ? threads_ : 1); }  // at once

 private:
  enum LaneNumber : size_t { kMemory, kDisk, kRemote, kLanes };
  struct Worker {
    LaneNumber lane = kMemory;
    bool busy = false;                    // guarded by mutex_
    std::unique_ptr<BatchCopier> copier;  // the worker's own while it is busy
    std::thread thread;
  };
  TransferEngine(DeviceMemory& device, HostArena& arena, int threads, const TransferEngineOptions& options);
  Status start(LaneNumber lane, int threads);
  void work(Worker& worker);
  bool pump_one() TORPOR_REQUIRES(mutex_);  // unlocks while bytes move
  void publish_begun(const Batch& batch) const noexcept;
  void record_result(const Batch& batch, int64_t began, DrainResult drained) noexcept TORPOR_REQUIRES(mutex_);
  void drop(JobRecord& record, BlockOutcome outcome) noexcept TORPOR_REQUIRES(mutex_);
  // Return the lane of the slowest store that the job uses.
  static LaneNumber lane_of(const Job& job) {
    const RecordStore* const store =
        job.source != nullptr && job.store != nullptr && job.store->traits().in_memory ? job.source : job.store;
    if (store == nullptr || store->traits().in_memory) return kMemory;
    return store->traits().shared ? kRemote : kDisk;
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
  CondVar ended_;  // a job or a batch ended, or a worker became idle
  std::array<Lane, kLanes> lanes_ TORPOR_GUARDED_BY(mutex_);
  std::map<JobId, JobRecord> jobs_ TORPOR_GUARDED_BY(mutex_);
  size_t open_ TORPOR_GUARDED_BY(mutex_) = 0;  // jobs that are not finished
  uint64_t last_id_ TORPOR_GUARDED_BY(mutex_) = 0;
  OutcomeCounts counts_ TORPOR_GUARDED_BY(mutex_){};
  DrainResult worst_ TORPOR_GUARDED_BY(mutex_);
  int waiting_for_idle_ TORPOR_GUARDED_BY(mutex_) = 0;
  bool ending_ TORPOR_GUARDED_BY(mutex_) = false;
  bool remote_lane_ TORPOR_GUARDED_BY(mutex_) = false;
  std::vector<std::unique_ptr<Worker>>
      workers_;  // changed with mutex_ held, and by one thread; last: their threads use all above
};

}  // namespace torpor
