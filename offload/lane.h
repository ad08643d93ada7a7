// SPDX-License-Identifier: Apache-2.0
// Lane: the jobs that wait for one kind of medium, the most urgent first, and how they are cut into batches: by bytes,
// so that all threads have something to do and an urgent job waits for one batch at most, and by count, so that small
// chunks go many at a time. Bookkeeping only: no threads, no bytes; not thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "offload/transfer_job.h"

namespace torpor {

struct LaneLimits {
  uint64_t batch_bytes = 0;  // a larger chunk is a batch of its own
  size_t batch_chunks = 0;
  size_t jobs = 0;  // most that wait
  int threads = 1;
};

// A job that was submitted. Its chunks are begun and ended in order of batches; those of a batch under way belong to
// the thread that moves it.
struct JobRecord {
  JobId id = JobId::kNone;
  Job job;
  uint64_t batch_bytes = 0;
  size_t begun = 0;  // chunks; those behind are not, and can be dropped
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

  // kResourceExhausted names the lane: it is full. `record` stays until it is out of the lane.
  Status admit(JobRecord& record);
  // The next batch of the most urgent job; none where nothing waits, or where that job is another one than `only`.
  Batch take(const JobRecord* only = nullptr);
  // What is not begun ends as `outcome`. Returns how many chunks.
  size_t drop(JobRecord& record, BlockOutcome outcome) noexcept;

 private:
  const std::string_view name_;
  const LaneLimits limits_;
  std::vector<JobRecord*> waiting_;  // in the order in which they go; each has chunks that are not begun
};

}  // namespace torpor
