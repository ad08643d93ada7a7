// SPDX-License-Identifier: Apache-2.0
#include "engine/chunk_restorer.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

namespace torpor {
namespace {

constexpr size_t kAtOnce = 2;  // jobs under way

// Return the chunks by rising addresses of their first pieces.
std::pair<std::vector<SavedChunk>, std::vector<ChunkPlan>> by_address(std::span<const SavedChunk> saved,
                                                                      std::vector<ChunkPlan> plans) {
  std::vector<size_t> order(plans.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return plans[a].pieces.front().address < plans[b].pieces.front().address; });
  std::pair<std::vector<SavedChunk>, std::vector<ChunkPlan>> sorted;
  sorted.first.reserve(order.size());
  sorted.second.reserve(order.size());
  for (const size_t i : order) {
    sorted.first.push_back(saved[i]);
    sorted.second.push_back(std::move(plans[i]));
  }
  return sorted;
}

}  // namespace

ChunkRestorer::~ChunkRestorer() { (void)end_all(); }

Status ChunkRestorer::copy(std::span<const SavedChunk> saved, std::vector<ChunkPlan> plans, Tier& source) {
  return catching([&]() -> Status {
    std::vector<SavedChunk> sorted;
    if (gate_.by_address()) {
      std::tie(sorted, plans) = by_address(saved, std::move(plans));
      saved = sorted;
    }
    const std::span<const ChunkPlan> all = plans_.emplace_back(std::move(plans));
    for (size_t first = 0, end = 0; first < all.size(); first = end) {
      const uint64_t most = std::min(gate_.job_bytes(), std::max(first_job_bytes_, begun_bytes_));
      for (uint64_t bytes = 0; end < all.size() && (bytes < most || gate_.all_there()); ++end) {
        TORPOR_TRY(gate_.wait_for(all[end]));
        bytes += all[end].bytes();
        begun_bytes_ += all[end].bytes();
      }
      TORPOR_TRY(begin(saved.subspan(first, end - first), all.subspan(first, end - first), source));
    }
    return ok();
  });
}

Status ChunkRestorer::copy_in_turn(std::span<const SavedChunk> saved, std::vector<ChunkPlan> plans, Tier& source,
                                   uint64_t job_bytes) {
  return catching([&]() -> Status {
    const std::span<const ChunkPlan> all = plans_.emplace_back(std::move(plans));
    for (size_t first = 0, end = 0; first < all.size(); first = end) {
      TORPOR_TRY(end_all());
      transfers_.release_staging();
      end = end_of_job(all, first, job_bytes);
      for (const ChunkPlan& chunk : all.subspan(first, end - first)) TORPOR_TRY(gate_.wait_for(chunk));
      TORPOR_TRY(begin(saved.subspan(first, end - first), all.subspan(first, end - first), source));
    }
    TORPOR_TRY(end_all());
    transfers_.release_staging();
    return ok();
  });
}

Status ChunkRestorer::begin(std::span<const SavedChunk> saved, std::span<const ChunkPlan> plans, Tier& source) {
  if (under_way_.size() == kAtOnce) TORPOR_TRY(end_oldest());
  under_way_.push_back(JobId::kNone);
  Result<JobId> begun = transfers_.begin_restore(saved, plans, source);
  if (begun) {
    under_way_.back() = *begun;
    return ok();
  }
  under_way_.pop_back();
  return std::move(begun).error();
}

Status ChunkRestorer::end_oldest() {
  const JobId oldest = under_way_.front();
  under_way_.pop_front();
  return transfers_.end_restore(oldest);
}

// Return the first error.
Status ChunkRestorer::end_all() {
  Status first;
  while (!under_way_.empty()) {
    Status ended = end_oldest();
    if (first) first = std::move(ended);
  }
  return first;
}

Status ChunkRestorer::wait() {
  TORPOR_TRY(gate_.wait_for_all());
  return end_all();
}

}  // namespace torpor
