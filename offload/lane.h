// SPDX-License-Identifier: Apache-2.0
// Lane: the jobs that wait for one kind of medium, by priority, and how they are cut into batches. Batches are limited
// in bytes, so that all threads have work and an urgent job waits for one batch at most, and in chunks, so that small
// chunks are moved many at a time. A store whose puts are dear gets larger batches. Bookkeeping only.
//
// Threads: none; the owner's lock guards it.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "offload/transfer_job.h"

namespace torpor {

struct LaneLimits {
  uint64_t batch_bytes = 0;  // a chunk that is larger is a batch of its own
  size_t batch_chunks = 0;
  size_t jobs = 0;  // most that may wait
  int threads = 1;
};

// A submitted job. Its chunks begin and end in order of batches. The chunks of a batch under way belong to the thread
// that moves it.
struct JobRecord {
  JobId id = JobId::kNone;
  Job job;
  uint64_t batch_bytes = 0;
  size_t begun = 0;  // number of chunks; those behind are not begun, and can be dropped
  size_t ended = 0;
  bool finished = false;
};

struct Batch {
  JobRecord* record = nullptr;  // null: no batch
  std::span<ChunkTransfer> chunks;
};

class Lane {
 public:
  Lane(std::string_view name, LaneLimits limits) : name_(name), limits_(limits) {}
  std::string_view name() const { return name_; }

  // Add a job. `record` stays valid until it is out of the lane. kResourceExhausted names the lane if it is full.
  Status admit(JobRecord& record);
  // Take the next batch of the job with the highest priority. Return an empty batch if no job waits, or if `only` is
  // given and is not that job.
  Batch take(const JobRecord* only = nullptr);
  // End the chunks that are not begun with `outcome`. Return their number.
  size_t drop(JobRecord& record, BlockOutcome outcome) noexcept;

 private:
  const std::string_view name_;
  const LaneLimits limits_;
  std::vector<JobRecord*> waiting_;  // in order of priority; each has chunks that are not begun
};

}  // namespace torpor
