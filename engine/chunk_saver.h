// SPDX-License-Identifier: Apache-2.0
// ChunkSaver: copies chunks of a rank's device memory into tiers, in the order given.
//
// Without a gate, the chunks of one tier are one job, which ends before the next tier is prepared: how much host memory
// that tier takes depends on what the one before has used. With a gate (engine/release_gate.h) all host memory has been
// taken before, and jobs are small. Two jobs are under way at a time, also across tiers, so that memory is released
// while other chunks are copied.
//
// Owner: one order to a rank. Threads: one.
#pragma once

#include <deque>
#include <span>
#include <vector>

#include "engine/release_gate.h"
#include "offload/blocking_transfers.h"

namespace torpor {

class ChunkSaver {
 public:
  // Both outlive this object. `gate`: releases the memory of saved chunks; or null.
  explicit ChunkSaver(BlockingTransfers& transfers, ReleaseGate* gate = nullptr) : transfers_(transfers), gate_(gate) {}
  ~ChunkSaver();  // cancels the jobs under way, and waits for them

  // Prepare `target` and begin to copy the chunks into it. As each job ends, append its chunks, as saved, to `saved`.
  // All arguments outlive this object. Return when the last job has begun. Errors: the target's, and those of jobs that
  // ended meanwhile. After an error the target has the chunks in `saved`, and perhaps others.
  Status copy(std::span<const ChunkPlan> chunks, RecordStore& target, std::vector<SavedChunk>& saved);
  // Return when all chunks are copied and all targets are finished. Errors: as copy().
  Status wait();
  // Copy only these chunks, and return when they are copied: one job of at most `job_bytes` at a time, for targets that
  // have little staging memory.
  Status copy_in_turn(std::span<const ChunkPlan> chunks, RecordStore& target, uint64_t job_bytes,
                      std::vector<SavedChunk>& saved);

 private:
  static constexpr size_t kAtOnce = 2;  // jobs under way
  struct Part {
    std::span<const ChunkPlan> chunks{};
    std::vector<SavedChunk>* saved = nullptr;
    JobId job = JobId::kNone;
  };
  Status begin(Part part, RecordStore& target);
  Status end_oldest();
  Status end_all();

  BlockingTransfers& transfers_;
  ReleaseGate* const gate_;
  std::vector<RecordStore*> targets_;  // not finished yet
  std::deque<Part> under_way_;
};

}  // namespace torpor
