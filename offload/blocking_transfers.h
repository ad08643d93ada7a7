// SPDX-License-Identifier: Apache-2.0
// BlockingTransfers: copies lists of chunks by jobs of a TransferEngine, and waits for them. Sleeps, wakes, checkpoints
// and digests use it; an engine that serves submits jobs of its own.
//
// Each call makes one all-or-nothing job: if one chunk fails, those that are not begun are cancelled, and the call
// returns the first error.
//
// Threads: all methods from any thread. The lock guards the watcher alone, and is not held while bytes move.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "base/progress_file.h"
#include "base/status.h"
#include "offload/transfer_engine.h"

namespace torpor {

class BlockingTransfers {
 public:
  // `engine` outlives this object, which must stay until every part that was begun has ended.
  explicit BlockingTransfers(TransferEngine& engine) : engine_(engine) {}
  TransferEngine& engine() const { return engine_; }

  // Plans and store stay valid until the call returns.
  //
  // Prepare `target`, copy all chunks into it, and finish it. After an error the store's content is invalid.
  Result<std::vector<SavedChunk>> save(std::span<const ChunkPlan> plans, RecordStore& target);
  // Copy every chunk of `saved` (the same keys in the same order as `plans`) to the device. kIncompatible names a chunk
  // that was not saved, or with another size. kCorruption names the first chunk whose digest is wrong; the device's
  // bytes are then invalid.
  Status restore(std::span<const SavedChunk> saved, std::span<const ChunkPlan> plans, RecordStore& source);
  // Begin or end a part of a save or a restore; the caller does other work meanwhile. Every part that was begun must be
  // ended, after an error too; plans and store stay valid until then. begin_save() neither prepares nor finishes the
  // store.
  Result<JobId> begin_save(std::span<const ChunkPlan> plans, RecordStore& target);
  Result<std::vector<SavedChunk>> end_save(JobId part);
  Result<JobId> begin_restore(std::span<const SavedChunk> saved, std::span<const ChunkPlan> plans, RecordStore& source);
  Status end_restore(JobId part);
  // Return the digests of the chunks as they are in device memory now.
  Result<std::vector<Digest>> digests(std::span<const ChunkPlan> plans);
  // Save chunks in the background, with the lowest priority and without progress. Neither prepares nor finishes
  // `target`: for a part of its content.
  Result<std::vector<SavedChunk>> put(std::span<const ChunkPlan> plans, RecordStore& target);
  // Move chunks from `source`, a store in memory, to `target`, as put() does. `saved` says where `source` has them, and
  // on return where `target` has them.
  Status move(std::span<const ChunkPlan> plans, std::span<SavedChunk> saved, RecordStore& source, RecordStore& target);
  // Report the progress of later calls of save(), restore() and digests(), and of parts, to `progress`, which may
  // cancel them: they then fail with kAborted. Null: stop that.
  void watch(std::shared_ptr<ProgressFile> progress);

 private:
  std::shared_ptr<ProgressFile> watcher() const;
  Result<JobId> submit_watched(Job job);
  Result<std::vector<ChunkTransfer>> wait_watched(JobId id);
  Result<std::vector<ChunkTransfer>> submit_and_wait(Job job);
  Result<std::vector<ChunkTransfer>> do_in_background(Job job);

  TransferEngine& engine_;
  mutable Mutex mutex_;
  std::shared_ptr<ProgressFile> progress_ TORPOR_GUARDED_BY(mutex_);  // from watch()
};

}  // namespace torpor
