// SPDX-License-Identifier: Apache-2.0
#include "engine/chunk_restorer.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace torpor {
namespace {

constexpr size_t kAtOnce = 2;  // jobs under way
// The most chunks of a job: their descriptions fit into the CPU's caches, and the next job uses the same memory.
constexpr size_t kJobChunks = 16384;

}  // namespace

ChunkRestorer::~ChunkRestorer() {
  for (const Job& job : under_way_) (void)transfers_.engine().cancel(job.id);
  (void)end_all();
}

Result<ChunkRestorer::Plans> ChunkRestorer::locate(std::span<const SavedChunk> saved) const {
  TORPOR_ASSIGN_OR_RETURN(std::vector<ChunkPlan> plans, locate_(saved));
  return std::make_shared<const std::vector<ChunkPlan>>(std::move(plans));
}

// Return the chunks in the order of the addresses of their first pieces.
Result<std::vector<SavedChunk>> ChunkRestorer::by_address(std::span<const SavedChunk> saved) const {
  TORPOR_ASSIGN_OR_RETURN(const Plans plans, locate(saved));
  std::vector<size_t> order(saved.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return (*plans)[a].pieces.front().address < (*plans)[b].pieces.front().address;
  });
  std::vector<SavedChunk> sorted;
  sorted.reserve(order.size());
  for (const size_t i : order) sorted.push_back(saved[i]);
  return sorted;
}

Status ChunkRestorer::copy(std::span<const SavedChunk> saved, RecordStore& source) {
  return try_catch([&]() -> Status {
    std::vector<SavedChunk> sorted;
    if (gate_.by_address()) {
      TORPOR_ASSIGN_OR_RETURN(sorted, by_address(saved));
      saved = sorted;
    }
    while (!saved.empty()) {
      const std::span<const SavedChunk> some = saved.first(std::min(saved.size(), kJobChunks));
      saved = saved.subspan(some.size());
      TORPOR_ASSIGN_OR_RETURN(const Plans plans, locate(some));
      const std::vector<ChunkPlan>& all = *plans;
      for (size_t first = 0, end = 0; first < all.size(); first = end) {
        const uint64_t most = std::min(gate_.job_bytes(), std::max(first_job_bytes_, begun_bytes_));
        for (uint64_t bytes = 0; end < all.size() && (bytes < most || gate_.all_there()); ++end) {
          TORPOR_RETURN_IF_ERROR(gate_.wait_for(all[end]));
          bytes += all[end].bytes();
          begun_bytes_ += all[end].bytes();
        }
        TORPOR_RETURN_IF_ERROR(begin(some.subspan(first, end - first), plans, first, source));
      }
    }
    return ok();
  });
}

Status ChunkRestorer::copy_in_turn(std::span<const SavedChunk> saved, RecordStore& source, uint64_t job_bytes) {
  return try_catch([&]() -> Status {
    TORPOR_ASSIGN_OR_RETURN(const Plans plans, locate(saved));
    const std::vector<ChunkPlan>& all = *plans;
    for (size_t first = 0, end = 0; first < all.size(); first = end) {
      TORPOR_RETURN_IF_ERROR(end_all());
      transfers_.engine().release_staging();
      end = end_of_job(all, first, job_bytes);
      for (size_t i = first; i < end; ++i) TORPOR_RETURN_IF_ERROR(gate_.wait_for(all[i]));
      TORPOR_RETURN_IF_ERROR(begin(saved.subspan(first, end - first), plans, first, source));
    }
    TORPOR_RETURN_IF_ERROR(end_all());
    transfers_.engine().release_staging();
    return ok();
  });
}

// `saved`: the chunks of the job. `first`: the position in `plans` of the first of them.
Status ChunkRestorer::begin(std::span<const SavedChunk> saved, const Plans& plans, size_t first, RecordStore& source) {
  if (under_way_.size() == kAtOnce) TORPOR_RETURN_IF_ERROR(end_oldest());
  under_way_.push_back({.plans = plans});
  Result<JobId> begun = transfers_.begin_restore(saved, std::span(*plans).subspan(first, saved.size()), source);
  if (begun) {
    under_way_.back().id = *begun;
    return ok();
  }
  under_way_.pop_back();
  return std::move(begun).error();
}

Status ChunkRestorer::end_oldest() {
  const Job oldest = std::move(under_way_.front());
  under_way_.pop_front();
  return transfers_.end_restore(oldest.id);
}

// Wait for all jobs. Return the first error.
Status ChunkRestorer::end_all() {
  Status first;
  while (!under_way_.empty()) {
    Status ended = end_oldest();
    if (!ended) {
      for (const Job& job : under_way_) (void)transfers_.engine().cancel(job.id);
    }
    if (first) first = std::move(ended);
  }
  return first;
}

Status ChunkRestorer::wait() {
  TORPOR_RETURN_IF_ERROR(gate_.wait_for_all());
  return end_all();
}

Status restore_attached(BlockingTransfers& transfers, const DeviceChunks& chunks, std::span<const SavedChunk> saved,
                        RecordStore& source) {
  AllAttached gate;
  ChunkRestorer copier(transfers, gate, locate_in(chunks));
  TORPOR_RETURN_IF_ERROR(copier.copy(saved, source));
  return copier.wait();
}

}  // namespace torpor
