// SPDX-License-Identifier: Apache-2.0
// ChunkSaver: copies chunks of a rank's device memory into tiers, in the order in which they are given.
//
// Where nobody takes the memory meanwhile, all chunks of a tier are one job, and it ends before the next tier is made
// ready: what that brings up of host memory depends on what the one before took. With a gate (engine/release_gate.h)
// all host memory is there before, and jobs are small. Two are under way, also from one tier to the next, so that
// memory is released while others are copied.
//
// Owner: one order to a rank. Threads: one.
#pragma once

#include <deque>
#include <span>
#include <vector>

#include "engine/release_gate.h"
#include "offload/transfer_engine.h"

namespace torpor {

class ChunkSaver {
 public:
  // Both outlive it. Without a gate (null) nobody is told what is saved.
  explicit ChunkSaver(TransferEngine& transfers, ReleaseGate* gate = nullptr) : transfers_(transfers), gate_(gate) {}
  ~ChunkSaver();  // cancels what is under way, and waits for it

  // Make `target` ready and begin to copy the chunks into it; as each job ends, append to `saved` what its chunks are
  // there. All arguments outlive this. Return when the last job is begun. Errors: the target's, and those of jobs that
  // have ended meanwhile. After an error a target has the chunks in `saved`, and nobody knows what else.
  Status copy(std::span<const ChunkPlan> chunks, RecordStore& target, std::vector<SavedChunk>& saved);
  // Return when all is copied and all targets are finished.
  Status wait();
  // The same for these chunks alone, one job of at most `job_bytes` at a time, where staging memory is short.
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

  TransferEngine& transfers_;
  ReleaseGate* const gate_;
  std::vector<RecordStore*> targets_;  // that are not finished
  std::deque<Part> under_way_;
};

}  // namespace torpor
