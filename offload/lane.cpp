// SPDX-License-Identifier: Apache-2.0
#include "offload/lane.h"

#include <algorithm>

#include <fmt/core.h>

#include "base/units.h"

namespace torpor {
namespace {

constexpr uint64_t kLeastBatchBytes = 256 * kKiB;  // a smaller batch is not worth handing to another thread
// Each thread has two batches under way. If a job had fewer, some threads would have no work.
constexpr uint64_t kBatchesPerThread = 2;

}  // namespace

Status Lane::admit(JobRecord& record) {
  if (waiting_.size() >= limits_.jobs) {
    return Error{.code = Code::kResourceExhausted,
                 .what = fmt::format("the {} lane is full: {} jobs wait", name_, waiting_.size()),
                 .next_step = "wait for some of them"};
  }
  uint64_t bytes = 0;
  for (const ChunkTransfer& chunk : record.job.chunks) bytes += chunk.plan->bytes();
  const uint64_t share = bytes / (static_cast<uint64_t>(limits_.threads) * kBatchesPerThread);
  record.batch_bytes = std::min(limits_.batch_bytes, std::max(share, kLeastBatchBytes));
  const bool puts = record.job.kind == JobKind::kSave || record.job.kind == JobKind::kMove;
  if (puts) record.batch_bytes = std::max(record.batch_bytes, record.job.store->traits().bytes_per_put);
  const auto behind = std::find_if(waiting_.begin(), waiting_.end(),
                                   [&](const JobRecord* other) { return other->job.priority > record.job.priority; });
  waiting_.insert(behind, &record);
  return ok();
}

Batch Lane::take(const JobRecord* only) {
  if (waiting_.empty() || (only != nullptr && waiting_.front() != only)) return {};
  JobRecord& record = *waiting_.front();
  const size_t first = record.begun;
  uint64_t bytes = 0;
  while (record.begun < record.job.chunks.size() && record.begun - first < limits_.batch_chunks) {
    bytes += record.job.chunks[record.begun].plan->bytes();
    if (bytes > record.batch_bytes && record.begun > first) break;
    ++record.begun;
  }
  if (record.begun == record.job.chunks.size()) waiting_.erase(waiting_.begin());
  return {&record, std::span(record.job.chunks).subspan(first, record.begun - first)};
}

size_t Lane::drop(JobRecord& record, BlockOutcome outcome) noexcept {
  const size_t dropped = record.job.chunks.size() - record.begun;
  for (; record.begun < record.job.chunks.size(); ++record.begun) {
    ChunkTransfer& chunk = record.job.chunks[record.begun];
    chunk.outcome = outcome;
    chunk.status = Error{.code = Code::kAborted, .what = "cancelled"};  // a text that needs no allocation
  }
  std::erase(waiting_, &record);
  return dropped;
}

}  // namespace torpor
