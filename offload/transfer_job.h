// SPDX-License-Identifier: Apache-2.0
// The jobs of a TransferEngine and their results. Values.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "allocator/device_memory.h"
#include "base/mutex.h"
#include "base/progress_file.h"
#include "base/status.h"
#include "offload/chunk.h"
#include "offload/outcome.h"
#include "offload/record_store.h"
#include "offload/transfer_priority.h"

namespace torpor {

enum class JobId : uint64_t { kNone };

enum class JobKind : uint8_t {
  kSave,     // device -> store
  kRestore,  // store -> device; fails a chunk whose digest is wrong; bytes of a disk are checked before they are copied
  kDigest,   // digests of device memory as it is now
  kMove,     // `source`, a store -> store; does not use the device
  kFind,     // moves nothing: looks up whether a shared store has the blocks; kNotFound if not
};

// Waits for all work that anyone gave the device before, once for all jobs that share it. Whoever needs it first waits,
// later ones with it. Threads: any.
class EarlierWork {
 public:
  Status wait_for(DeviceMemory& device) {
    const MutexLock lock(mutex_);
    if (!ended_) ended_ = device.synchronize();
    return *ended_;
  }

 private:
  Mutex mutex_;  // held while the first waits
  std::optional<Status> ended_ TORPOR_GUARDED_BY(mutex_);
};

// One chunk of a job, and its result.
struct ChunkTransfer {
  // Stays valid until the job has ended. For kMove only its size counts.
  const ChunkPlan* plan = nullptr;
  SavedChunk saved;               // set by kSave and kDigest, required by kRestore and kMove
  StoreSlot slot = 0;             // kSave, kMove: the target slot in a SlotStore
  const BlockKey* key = nullptr;  // of a block: RecordPart::key; stays valid as `plan` does
  // One of kTransferred, kFailed, kUnproven (never reuse either side), kCancelled, kShutDown.
  BlockOutcome outcome = BlockOutcome::kFailed;
  Status status;  // an error unless kTransferred
};

struct Job {
  JobKind kind = JobKind::kSave;
  RecordStore* store = nullptr;   // stays valid until the job has ended; null for kDigest
  RecordStore* source = nullptr;  // kMove only; stays valid as `store` does
  std::vector<ChunkTransfer> chunks;
  // kRestore only: no byte goes to the device before what it had when the job was submitted is over. The thread that
  // copies waits. If the wait fails, so do the chunks. Null: the caller ensures the order.
  std::shared_ptr<EarlierWork> after{};
  TransferPriority priority = TransferPriority::kOffload;
  CopyBy copy_by = CopyBy::kEngines;  // kFastest: only while the engine computes nothing
  bool all_or_nothing = false;        // after a failed chunk, cancel the chunks that are not begun
  bool polled = false;                // the result is taken with poll(), not wait()
  uint64_t number = 0;                // the caller's number for the job, in events
  // Receives what was moved. If it is cancelled, the chunks that are not begun are cancelled. May be null.
  std::shared_ptr<ProgressFile> progress{};
};

struct JobResult {
  JobId id = JobId::kNone;
  Status status;  // of the first chunk that failed; kAborted if chunks were only cancelled
  std::vector<ChunkTransfer> chunks;
};

}  // namespace torpor
