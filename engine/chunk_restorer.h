// SPDX-License-Identifier: Apache-2.0
// ChunkRestorer: copies saved chunks back into a rank's device memory, in the order given.
//
// A gate waits for the memory of each chunk. Two jobs are under way at a time, also across sources, so that
// copying and checking overlap with mapping, or with the other engine's releases. The device locations of a job's
// chunks are looked up when the job begins and freed when it ends, so that a wake of a million blocks never has a list
// of all. (copy_in_turn(), and a gate whose memory comes by address, do need such a list.)
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
#include "offload/blocking_transfers.h"

namespace torpor {

class ChunkRestorer {
 public:
  // Returns where each of these chunks belongs (DeviceChunks::of_saved()).
  using Locate = std::function<Result<std::vector<ChunkPlan>>(std::span<const SavedChunk>)>;

  // `transfers` and `gate` outlive this object. `first_job_bytes`: the size of the first job. Each next job may be as
  // large as all before it, up to the gate's job_bytes(), or of any size once all memory is there. So copies begin as
  // soon as some memory is there, and few jobs are small.
  ChunkRestorer(BlockingTransfers& transfers, RestoreGate& gate, Locate locate, uint64_t first_job_bytes = 32 * kMiB)
      : transfers_(transfers), gate_(gate), locate_(std::move(locate)), first_job_bytes_(first_job_bytes) {}
  ~ChunkRestorer();  // cancels the jobs under way, and waits for them

  // Own a source until its jobs have ended. A source that is not passed here outlives this object.
  void keep(std::shared_ptr<RecordStore> source) { sources_.push_back(std::move(source)); }
  // Begin to copy chunks from `source`, in which `saved` describes them. Return when the last job has begun. Errors:
  // those of Locate, of the gate, and of jobs that ended meanwhile; kCorruption names the first damaged chunk. After an
  // error the content of the device memory is void.
  Status copy(std::span<const SavedChunk> saved, RecordStore& source);
  // The same with one job of at most `job_bytes` at a time, for sources that have little staging memory. Return when
  // all chunks are copied.
  Status copy_in_turn(std::span<const SavedChunk> saved, RecordStore& source, uint64_t job_bytes);
  // Return when all memory is there and all chunks are copied. Errors: as copy().
  Status wait();

 private:
  using Plans = std::shared_ptr<const std::vector<ChunkPlan>>;
  struct Job {
    JobId id = JobId::kNone;
    Plans plans;  // the job's chunks point into it
  };
  Result<Plans> locate(std::span<const SavedChunk> saved) const;
  Result<std::vector<SavedChunk>> by_address(std::span<const SavedChunk> saved) const;
  Status begin(std::span<const SavedChunk> saved, const Plans& plans, size_t first, RecordStore& source);
  Status end_oldest();
  Status end_all();

  BlockingTransfers& transfers_;
  RestoreGate& gate_;
  const Locate locate_;
  std::vector<std::shared_ptr<RecordStore>> sources_;
  std::deque<Job> under_way_;
  const uint64_t first_job_bytes_;
  uint64_t begun_bytes_ = 0;  // of all jobs that copy() began
};

// Return a Locate over a rank's own chunks. `chunks` outlives it.
inline ChunkRestorer::Locate locate_in(const DeviceChunks& chunks) {
  return [&chunks](std::span<const SavedChunk> saved) { return chunks.of_saved(saved); };
}
// Copy chunks from `source` into attached memory of the rank. Errors: as ChunkRestorer::copy().
Status restore_attached(BlockingTransfers& transfers, const DeviceChunks& chunks, std::span<const SavedChunk> saved,
                        RecordStore& source);

}  // namespace torpor
