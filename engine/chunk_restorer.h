// SPDX-License-Identifier: Apache-2.0
// ChunkRestorer: copies what was saved of a rank back into its device memory, in the order in which it is given.
//
// A gate says when the memory of each chunk is there. Two jobs are under way, so that copying and checking go on while
// memory is mapped or another engine releases it, and from one source to the next. Where chunks belong is asked when
// their job is due, and forgotten when that has ended, so that a wake of a million blocks has no list of all. (By
// address, and one job after the other, there is such a list.)
//
// Owner: one order to a rank. Threads: one.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/units.h"
#include "engine/device_chunks.h"
#include "engine/restore_gate.h"
#include "offload/transfer_engine.h"

namespace torpor {

class ChunkRestorer {
 public:
  // Return where each of these chunks belongs (DeviceChunks::of_saved()).
  using Locate = std::function<Result<std::vector<ChunkPlan>>(std::span<const SavedChunk>)>;

  // The first two outlive it. `first_job_bytes`: of the first job; each next one may be as large as all before it, up
  // to the gate's. So copies begin as soon as some memory is there, and few jobs are small.
  ChunkRestorer(TransferEngine& transfers, RestoreGate& gate, Locate locate, uint64_t first_job_bytes = 32 * kMiB)
      : transfers_(transfers), gate_(gate), locate_(std::move(locate)), first_job_bytes_(first_job_bytes) {}
  ~ChunkRestorer();  // cancels what is under way, and waits for it

  // Keep a source until its jobs have ended. One that is not kept outlives this.
  void keep(std::shared_ptr<RecordStore> source) { sources_.push_back(std::move(source)); }
  // Begin to copy chunks from `source`: `saved` says what they are there. Return when the last job is begun. Errors:
  // those of locate, the gate's, and those of jobs that have ended meanwhile (kCorruption names the first damaged
  // chunk). After an error the device's bytes are void.
  Status copy(std::span<const SavedChunk> saved, RecordStore& source);
  // The same, one job of at most `job_bytes` at a time, where staging memory is short. Return when all is copied.
  Status copy_in_turn(std::span<const SavedChunk> saved, RecordStore& source, uint64_t job_bytes);
  // Return when all memory is there and all chunks are copied.
  Status wait();

 private:
  using Plans = std::shared_ptr<const std::vector<ChunkPlan>>;
  struct Job {
    JobId id = JobId::kNone;
    Plans plans;  // to which it points
  };
  Result<Plans> locate(std::span<const SavedChunk> saved) const;
  Result<std::vector<SavedChunk>> by_address(std::span<const SavedChunk> saved) const;
  Status begin(std::span<const SavedChunk> saved, const Plans& plans, size_t first, RecordStore& source);
  Status end_oldest();
  Status end_all();

  TransferEngine& transfers_;
  RestoreGate& gate_;
  const Locate locate_;
  std::vector<std::shared_ptr<RecordStore>> sources_;
  std::deque<Job> under_way_;
  const uint64_t first_job_bytes_;
  uint64_t begun_bytes_ = 0;  // of all jobs of copy()
};

// Return a Locate of a rank's own memory, which outlives it.
inline ChunkRestorer::Locate locate_in(const DeviceChunks& chunks) {
  return [&chunks](std::span<const SavedChunk> saved) { return chunks.of_saved(saved); };
}
// Copy chunks from `source` into memory of the rank that is there. Errors: ChunkRestorer::copy().
Status restore_attached(TransferEngine& transfers, const DeviceChunks& chunks, std::span<const SavedChunk> saved,
                        RecordStore& source);

}  // namespace torpor
