// SPDX-License-Identifier: Apache-2.0
// What a TransferEngine is asked to do, and what it says became of it. Values.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "allocator/device_memory.h"
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
  kRestore,  // store -> device; a chunk is good only if its digest is right: of a disk's bytes before they go up
  kDigest,   // of what is in device memory now
  kMove,     // `source`, a store -> store; the device has no part in it
  kFind,     // nothing moves: whether the store, a shared one, has them; kNotFound: it has not
};

// One chunk on its way, and what became of it.
struct ChunkTransfer {
  // Stays as it is until the job has ended. kMove: its pieces say only how many bytes there are.
  const ChunkPlan* plan = nullptr;
  SavedChunk saved;               // kSave and kDigest fill it, kRestore and kMove need it
  StoreSlot slot = 0;             // kSave, kMove: of a SlotStore, where it goes
  const BlockKey* key = nullptr;  // of a block: RecordPart::key; stays as `plan` does
  // kTransferred, kFailed, kUnproven (never reuse either side), kCancelled or kShutDown.
  BlockOutcome outcome = BlockOutcome::kFailed;
  Status status;  // an error unless kTransferred
};

struct Job {
  JobKind kind = JobKind::kSave;
  RecordStore* store = nullptr;   // stays until the job has ended; kDigest has none
  RecordStore* source = nullptr;  // kMove: the same
  std::vector<ChunkTransfer> chunks;
  TransferPriority priority = TransferPriority::kOffload;
  CopyBy copy_by = CopyBy::kEngines;  // kFastest: the engine stands still meanwhile
  bool all_or_nothing = false;        // after the first chunk that failed, those that are not begun are cancelled
  bool polled = false;                // its result is for poll(), otherwise for wait()
  uint64_t number = 0;                // who asked knows it by this; for events
  // Is told what was moved; once it is cancelled, what is not begun is, too. May be null.
  std::shared_ptr<ProgressFile> progress{};
};

struct JobResult {
  JobId id = JobId::kNone;
  Status status;  // that of the first chunk that failed; kAborted where some were only cancelled
  std::vector<ChunkTransfer> chunks;
};

}  // namespace torpor
