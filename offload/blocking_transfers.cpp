// SPDX-License-Identifier: Apache-2.0
#include "offload/blocking_transfers.h"

#include <fmt/core.h>

namespace torpor {
namespace {

std::vector<ChunkTransfer> transfers_of(std::span<const ChunkPlan> plans) {
  std::vector<ChunkTransfer> chunks(plans.size());
  for (size_t i = 0; i < plans.size(); ++i) chunks[i].plan = &plans[i];
  return chunks;
}

}  // namespace

void BlockingTransfers::watch(std::shared_ptr<ProgressFile> progress) {
  const MutexLock lock(mutex_);
  progress_ = std::move(progress);
}

std::shared_ptr<ProgressFile> BlockingTransfers::watcher() const {
  const MutexLock lock(mutex_);
  return progress_;
}

Result<JobId> BlockingTransfers::submit_watched(Job job) {
  job.all_or_nothing = true;
  job.progress = watcher();
  if (job.progress != nullptr) {
    TORPOR_RETURN_IF_ERROR(job.progress->check());
    for (const ChunkTransfer& chunk : job.chunks) job.progress->expect(chunk.plan->bytes());
  }
  return engine_.submit(std::move(job));
}

Result<std::vector<ChunkTransfer>> BlockingTransfers::wait_watched(JobId id) {
  JobResult result = engine_.wait(id);
  if (!result.status) {
    const std::shared_ptr<ProgressFile> progress = watcher();
    if (progress != nullptr && result.status.error().code == Code::kAborted) TORPOR_RETURN_IF_ERROR(progress->check());
    return std::move(result.status).error();
  }
  return std::move(result.chunks);
}

Result<std::vector<ChunkTransfer>> BlockingTransfers::submit_and_wait(Job job) {
  TORPOR_ASSIGN_OR_RETURN(const JobId id, submit_watched(std::move(job)));
  return wait_watched(id);
}

Result<std::vector<ChunkTransfer>> BlockingTransfers::do_in_background(Job job) {
  job.priority = TransferPriority::kOffload;
  job.all_or_nothing = true;
  TORPOR_ASSIGN_OR_RETURN(const JobId id, engine_.submit(std::move(job)));
  JobResult result = engine_.wait(id);
  if (!result.status) return std::move(result.status).error();
  return std::move(result.chunks);
}

Result<std::vector<SavedChunk>> BlockingTransfers::put(std::span<const ChunkPlan> plans, RecordStore& target) {
  return try_catch([&]() -> Result<std::vector<SavedChunk>> {
    std::vector<SavedChunk> saved;
    saved.reserve(plans.size());
    TORPOR_ASSIGN_OR_RETURN(
        std::vector<ChunkTransfer> chunks,
        do_in_background({.kind = JobKind::kSave, .store = &target, .chunks = transfers_of(plans)}));
    for (ChunkTransfer& chunk : chunks) saved.push_back(std::move(chunk.saved));
    return saved;
  });
}

Status BlockingTransfers::move(std::span<const ChunkPlan> plans, std::span<SavedChunk> saved, RecordStore& source,
                               RecordStore& target) {
  return try_catch([&]() -> Status {
    std::vector<ChunkTransfer> chunks = transfers_of(plans);
    for (size_t i = 0; i < plans.size(); ++i) chunks[i].saved = saved[i];
    TORPOR_ASSIGN_OR_RETURN(
        std::vector<ChunkTransfer> moved,
        do_in_background({.kind = JobKind::kMove, .store = &target, .source = &source, .chunks = std::move(chunks)}));
    for (size_t i = 0; i < plans.size(); ++i) saved[i] = std::move(moved[i].saved);
    return ok();
  });
}

Result<JobId> BlockingTransfers::begin_save(std::span<const ChunkPlan> plans, RecordStore& target) {
  return try_catch([&]() -> Result<JobId> {
    return submit_watched({.kind = JobKind::kSave,
                           .store = &target,
                           .chunks = transfers_of(plans),
                           .priority = TransferPriority::kSleep,
                           .copy_by = CopyBy::kFastest});
  });
}

Result<std::vector<SavedChunk>> BlockingTransfers::end_save(JobId part) {
  return try_catch([&]() -> Result<std::vector<SavedChunk>> {
    TORPOR_ASSIGN_OR_RETURN(std::vector<ChunkTransfer> chunks, wait_watched(part));
    std::vector<SavedChunk> saved;
    saved.reserve(chunks.size());
    for (ChunkTransfer& chunk : chunks) saved.push_back(std::move(chunk.saved));
    return saved;
  });
}

Result<std::vector<SavedChunk>> BlockingTransfers::save(std::span<const ChunkPlan> plans, RecordStore& target) {
  return try_catch([&]() -> Result<std::vector<SavedChunk>> {
    TORPOR_RETURN_IF_ERROR(engine_.usable());
    uint64_t total = 0;
    for (const ChunkPlan& plan : plans) total += plan.bytes();
    TORPOR_RETURN_IF_ERROR(target.prepare(total, plans.size()));
    TORPOR_ASSIGN_OR_RETURN(const JobId all, begin_save(plans, target));
    TORPOR_ASSIGN_OR_RETURN(std::vector<SavedChunk> saved, end_save(all));
    TORPOR_RETURN_IF_ERROR(target.finish());
    return saved;
  });
}

Result<JobId> BlockingTransfers::begin_restore(std::span<const SavedChunk> saved, std::span<const ChunkPlan> plans,
                                               RecordStore& source) {
  return try_catch([&]() -> Result<JobId> {
    std::vector<ChunkTransfer> chunks = transfers_of(plans);
    for (size_t i = 0; i < plans.size(); ++i) {
      if (i >= saved.size() || saved[i].key != plans[i].key || saved[i].bytes != plans[i].bytes()) {
        return Error{.code = Code::kIncompatible,
                     .what = fmt::format("{} was not saved, or with another size", plans[i].key.to_string()),
                     .next_step = "wake it into the engine configuration that saved it"};
      }
      chunks[i].saved = saved[i];
    }
    return submit_watched({.kind = JobKind::kRestore,
                           .store = &source,
                           .chunks = std::move(chunks),
                           .priority = TransferPriority::kLoad,
                           .copy_by = CopyBy::kFastest});
  });
}

Status BlockingTransfers::end_restore(JobId part) {
  return try_catch([&]() -> Status {
    TORPOR_RETURN_IF_ERROR(wait_watched(part));
    return ok();
  });
}

Status BlockingTransfers::restore(std::span<const SavedChunk> saved, std::span<const ChunkPlan> plans,
                                  RecordStore& source) {
  TORPOR_ASSIGN_OR_RETURN(const JobId all, begin_restore(saved, plans, source));
  return end_restore(all);
}

Result<std::vector<Digest>> BlockingTransfers::digests(std::span<const ChunkPlan> plans) {
  return try_catch([&]() -> Result<std::vector<Digest>> {
    TORPOR_ASSIGN_OR_RETURN(
        const std::vector<ChunkTransfer> chunks,
        submit_and_wait(
            {.kind = JobKind::kDigest, .chunks = transfers_of(plans), .priority = TransferPriority::kSleep}));
    std::vector<Digest> digests;
    for (const ChunkTransfer& chunk : chunks) digests.push_back(chunk.saved.digest);
    return digests;
  });
}

}  // namespace torpor
