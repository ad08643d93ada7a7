// SPDX-License-Identifier: Apache-2.0
#include "engine/chunk_saver.h"

#include <iterator>
#include <limits>

namespace torpor {

ChunkSaver::~ChunkSaver() {
  for (const Part& part : under_way_) (void)transfers_.engine().cancel(part.job);
  for (; !under_way_.empty(); under_way_.pop_front()) (void)transfers_.end_save(under_way_.front().job);
}

Status ChunkSaver::copy(std::span<const ChunkPlan> chunks, RecordStore& target, std::vector<SavedChunk>& saved) {
  return try_catch([&]() -> Status {
    TORPOR_RETURN_IF_ERROR(transfers_.engine().usable());
    if (gate_ == nullptr) TORPOR_RETURN_IF_ERROR(end_all());
    TORPOR_RETURN_IF_ERROR(target.prepare(bytes_of(chunks), chunks.size()));
    targets_.push_back(&target);
    const uint64_t most = gate_ == nullptr ? std::numeric_limits<uint64_t>::max() : gate_->job_bytes();
    for (size_t first = 0, end = 0; first < chunks.size(); first = end) {
      for (uint64_t bytes = 0; end < chunks.size() && bytes < most; ++end) bytes += chunks[end].bytes();
      TORPOR_RETURN_IF_ERROR(begin({.chunks = chunks.subspan(first, end - first), .saved = &saved}, target));
    }
    return ok();
  });
}

Status ChunkSaver::copy_in_turn(std::span<const ChunkPlan> chunks, RecordStore& target, uint64_t job_bytes,
                                std::vector<SavedChunk>& saved) {
  for (size_t first = 0, end = 0; first < chunks.size(); first = end) {
    end = end_of_job(chunks, first, job_bytes);
    TORPOR_RETURN_IF_ERROR(copy(chunks.subspan(first, end - first), target, saved));
    TORPOR_RETURN_IF_ERROR(wait());
    transfers_.engine().release_staging();
  }
  return ok();
}

Status ChunkSaver::wait() {
  return try_catch([&]() -> Status {
    TORPOR_RETURN_IF_ERROR(end_all());
    for (RecordStore* const target : targets_) TORPOR_RETURN_IF_ERROR(target->finish());
    targets_.clear();
    return ok();
  });
}

Status ChunkSaver::begin(Part part, RecordStore& target) {
  if (under_way_.size() == kAtOnce) TORPOR_RETURN_IF_ERROR(end_oldest());
  under_way_.push_back(part);
  Result<JobId> begun = transfers_.begin_save(part.chunks, target);
  if (begun) {
    under_way_.back().job = *begun;
    return ok();
  }
  under_way_.pop_back();
  return std::move(begun).error();
}

Status ChunkSaver::end_all() {
  while (!under_way_.empty()) TORPOR_RETURN_IF_ERROR(end_oldest());
  return ok();
}

Status ChunkSaver::end_oldest() {
  const Part oldest = under_way_.front();
  under_way_.pop_front();
  TORPOR_ASSIGN_OR_RETURN(std::vector<SavedChunk> ended, transfers_.end_save(oldest.job));
  oldest.saved->insert(oldest.saved->end(), std::move_iterator(ended.begin()), std::move_iterator(ended.end()));
  return gate_ == nullptr ? ok() : gate_->on_saved(oldest.chunks);
}

}  // namespace torpor
