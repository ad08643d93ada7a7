// SPDX-License-Identifier: Apache-2.0
// OffloadWorker: reports its jobs. If there is no memory for a report, a later poll() makes it; nothing is lost.
#include <algorithm>
#include <iterator>

#include <fmt/core.h>

#include "kvcache/offload_job.h"
#include "kvcache/offload_worker.h"
#include "offload/batch_copier.h"

namespace torpor {
namespace {

// Return whether the error means that the stored bytes are bad. Other errors (of the device, no staging memory) say
// nothing about them.
bool is_bad_record(const Error& error) {
  return error.code == Code::kCorruption || error.code == Code::kIo || error.code == Code::kNotFound ||
         error.code == Code::kIncompatible || error.code == Code::kInternal;
}

}  // namespace

TransferReport OffloadWorker::poll() {
  TransferReport report{.rank = options_.rank};
  (void)transfers_.poll(ended_);
  size_t reported = 0;
  for (; reported < ended_.size(); ++reported) {
    const auto found = running_.find(ended_[reported].id);
    if (found == running_.end()) continue;
    if (!report_job(*found->second, ended_[reported], report)) break;
    running_.erase(found);
  }
  const bool all = reported == ended_.size();
  ended_.erase(ended_.begin(), ended_.begin() + static_cast<std::ptrdiff_t>(reported));
  while (all && !refused_.empty() && report_refused(*refused_.front(), report)) refused_.pop_front();
  (void)try_catch([&]() -> Status { return report_stores(report), ok(); });
  return report;
}

Status OffloadWorker::finish_loads(std::span<const std::string> requests) {
  return try_catch([&]() -> Status {
    std::vector<JobId> jobs;
    for (const auto& [id, job] : running_) {
      const auto [begin, end] = loads_of_.equal_range(job->planned.id);
      const bool named = std::any_of(begin, end, [&](const auto& load) {
        return std::find(requests.begin(), requests.end(), load.second) != requests.end();
      });
      if (named) jobs.push_back(id);
    }
    transfers_.wait_ended(jobs);
    return ok();
  });
}

bool OffloadWorker::wait_for_report(std::chrono::nanoseconds most) {
  return !refused_.empty() || !ended_.empty() || transfers_.wait_for_result(most);
}

bool OffloadWorker::report_refused(OffloadJob& running, TransferReport& report) {
  JobResult result{.status = copied(running.refused.error())};
  const Status made = try_catch([&]() -> Status {
    result.chunks.resize(running.planned.count);
    for (ChunkTransfer& chunk : result.chunks) chunk.status = copied(result.status.error());
    return ok();
  });
  return made && report_job(running, result, report);
}

// Add all of a job to the report. Return false and add nothing if there is no memory.
bool OffloadWorker::report_job(OffloadJob& running, const JobResult& result, TransferReport& report) {
  const size_t outcomes = report.outcomes.size();
  const Status added = try_catch([&]() -> Status {
    const PlannedJob& planned = running.planned;
    JobReport job{.id = planned.id, .first = static_cast<uint32_t>(outcomes)};
    std::vector<int32_t> bad_blocks;
    bool good = true;
    for (size_t i = 0; i < result.chunks.size(); ++i) {
      const BlockOutcome outcome = outcome_of(running, i, result.chunks[i]);
      good = good && outcome == BlockOutcome::kTransferred;
      if (outcome != BlockOutcome::kTransferred && planned.of_load()) bad_blocks.push_back(running.to[i]);
      report.outcomes.push_back(outcome);
    }
    if (good) {
      report.outcomes.resize(outcomes);
    } else {
      job.count = static_cast<uint32_t>(result.chunks.size());
      if (!result.status) {
        job.code = result.status.error().code;
        job.cause = fmt::format("rank {}: {}", options_.rank, result.status.error().what).substr(0, kMostCauseBytes);
      }
    }
    make_room(planned.id, bad_blocks.size());
    report.jobs.push_back(std::move(job));
    load_ended(planned.id, bad_blocks);
    return ok();
  });
  if (!added) report.outcomes.resize(outcomes);
  return added.has_value();
}

// Repeatable: a second call returns the same.
BlockOutcome OffloadWorker::outcome_of(const OffloadJob& running, size_t i, const ChunkTransfer& chunk) {
  const PlannedJob& planned = running.planned;
  if (planned.kind == PlanKind::kSkip) return BlockOutcome::kCancelled;
  if (chunk.outcome == BlockOutcome::kTransferred) {
    const bool writes = planned.kind == PlanKind::kPut || planned.kind == PlanKind::kMove;
    if (!writes || planned.target() != StoreId::kHost) return chunk.outcome;
    host_digests_[static_cast<size_t>(running.to[i])] = chunk.saved.digest;
    if (planned.kind == PlanKind::kMove || !host_->traits().addressable) return chunk.outcome;
    return host_->placed(running.to[i], chunk.saved.digest) ? chunk.outcome : BlockOutcome::kFailed;
  }
  if (chunk.outcome != BlockOutcome::kFailed || planned.kind == PlanKind::kPut) return chunk.outcome;
  if (planned.kind == PlanKind::kFind)
    return chunk.status.error().code == Code::kNotFound ? BlockOutcome::kAbsent : chunk.outcome;
  const bool up = planned.kind == PlanKind::kGet || planned.target() == StoreId::kHost;  // only reads can have failed
  const bool damaged = is_bad_record(chunk.status.error()) && (up || chunk.status.error().code == Code::kCorruption);
  return damaged ? BlockOutcome::kDamaged : chunk.outcome;
}

// Allocate what load_ended() needs.
void OffloadWorker::make_room(uint64_t job, size_t bad_blocks) {
  const auto [begin, end] = loads_of_.equal_range(job);
  for (auto at = begin; at != end; ++at) {
    std::vector<int32_t>& all = loading_.find(at->second)->second.ended.bad_blocks;
    all.reserve(all.size() + bad_blocks);
  }
  loaded_.reserve(loaded_.size() + static_cast<size_t>(std::distance(begin, end)));
}

void OffloadWorker::load_ended(uint64_t job, std::span<const int32_t> bad_blocks) noexcept {
  const auto [begin, end] = loads_of_.equal_range(job);
  for (auto at = begin; at != end; ++at) {
    const auto found = loading_.find(at->second);
    LoadedRequest& ended = found->second.ended;
    ended.bad_blocks.insert(ended.bad_blocks.end(), bad_blocks.begin(), bad_blocks.end());
    if (--found->second.jobs > 0) continue;
    loaded_.push_back(std::move(ended));
    loading_.erase(found);
  }
  loads_of_.erase(begin, end);
}

// Add the state of each store if jobs ended, or if the store began or stopped accepting.
void OffloadWorker::report_stores(TransferReport& report) {
  for (const StoreId id : {StoreId::kHost, StoreId::kDisk, StoreId::kRemote}) {
    const SlotStore* const of = store(id);
    if (of == nullptr) continue;
    const bool accepting = of->accepting();
    bool& last = accepting_[static_cast<size_t>(id)];
    if (report.jobs.empty() && accepting == last) continue;
    const StoreHealth health = of->health();
    report.stores.push_back(
        {id, accepting, health.put_bytes, health.got_bytes, health.write_errors, health.read_errors});
    last = accepting;
  }
}

}  // namespace torpor
