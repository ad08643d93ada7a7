// SPDX-License-Identifier: Apache-2.0
#include "offload/transfer_engine.h"

#include <algorithm>
#include <limits>

#include <fmt/core.h>

#include "base/units.h"

namespace torpor {
namespace {

// A disk needs many operations at once; a memory batch need only be worth a copy.
constexpr uint64_t kMemoryBatchBytes = 4 * kMiB;
constexpr uint64_t kDiskBatchBytes = 8 * kMiB;
constexpr size_t kBatchChunks = 256;
constexpr int kRemoteThreads = 4;  // each has a connection of its own; two fill a network of 25 Gb/s

}  // namespace

TransferEngine::TransferEngine(DeviceMemory& device, HostArena& arena, int threads,
                               const TransferEngineOptions& options)
    : device_(device),
      arena_(arena),
      threads_(threads),
      own_threads_(options.own_threads),
      port_(options.events),
      lanes_{Lane("memory", {.batch_bytes = kMemoryBatchBytes,
                             .batch_chunks = kBatchChunks,
                             .jobs = static_cast<size_t>(options.queued_jobs),
                             .threads = threads}),
             Lane("disk", {.batch_bytes = kDiskBatchBytes,
                           .batch_chunks = kBatchChunks,
                           .jobs = static_cast<size_t>(options.queued_jobs),
                           .threads = threads}),
             Lane("remote", {.batch_bytes = kDiskBatchBytes,
                             .batch_chunks = kBatchChunks,
                             .jobs = static_cast<size_t>(options.queued_jobs),
                             .threads = kRemoteThreads})} {}

Result<std::unique_ptr<TransferEngine>> TransferEngine::create(DeviceMemory& device, HostArena& arena,
                                                               TransferEngineOptions options) {
  if (options.threads < 0 || options.threads > TransferEngineOptions::kMostThreads || options.queued_jobs < 1) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("threads is {}, queued_jobs {}", options.threads, options.queued_jobs),
                 .next_step = fmt::format("use 1 to {} threads, or 0 for the machine's own number, and 1 job or more",
                                          TransferEngineOptions::kMostThreads)};
  }
  const int cores = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 8u));
  const int threads = !options.own_threads ? 1 : options.threads != 0 ? options.threads : cores;
  return try_catch([&]() -> Result<std::unique_ptr<TransferEngine>> {
    std::unique_ptr<TransferEngine> engine(new TransferEngine(device, arena, threads, options));
    for (const LaneNumber lane : {kMemory, kDisk}) TORPOR_RETURN_IF_ERROR(engine->start(lane, threads));
    return engine;
  });
}

Status TransferEngine::start(LaneNumber lane, int threads) {
  for (int i = 0; i < threads; ++i) {
    auto worker = std::make_unique<Worker>();
    worker->lane = lane;
    TORPOR_ASSIGN_OR_RETURN(worker->copier, BatchCopier::create(device_, arena_, quarantined_));
    const MutexLock lock(mutex_);
    workers_.push_back(std::move(worker));
    Worker& started = *workers_.back();
    const Status running = try_catch([&]() -> Status {
      if (own_threads_) started.thread = std::thread([this, &started] { work(started); });
      return ok();
    });
    if (running) continue;
    workers_.pop_back();
    return running;
  }
  return ok();
}

Status TransferEngine::open_remote_lane() {
  int missing = own_threads_ ? kRemoteThreads : 1;
  {
    const MutexLock lock(mutex_);
    if (remote_lane_) return ok();
    // Threads of an earlier call that failed.
    for (const auto& worker : workers_) missing -= worker->lane == kRemote ? 1 : 0;
  }
  TORPOR_RETURN_IF_ERROR(try_catch([&] { return start(kRemote, missing); }));
  const MutexLock lock(mutex_);
  remote_lane_ = true;
  return ok();
}

TransferEngine::~TransferEngine() {
  {
    const MutexLock lock(mutex_);
    ending_ = true;
    for (auto& [id, record] : jobs_) drop(record, BlockOutcome::kShutDown);
  }
  for (CondVar& work : work_) work.notify_all();
  for (const auto& worker : workers_) {
    if (worker->thread.joinable()) worker->thread.join();
  }
}

Status TransferEngine::usable() const { return quarantined_ ? Status(quarantined_error()) : ok(); }

Result<JobId> TransferEngine::submit(Job job) {
  return try_catch([&]() -> Result<JobId> {
    TORPOR_RETURN_IF_ERROR(usable());
    const bool moves = job.kind == JobKind::kMove;
    const bool described = (job.store == nullptr) == (job.kind == JobKind::kDigest) &&
                           (job.source != nullptr) == moves &&
                           std::all_of(job.chunks.begin(), job.chunks.end(),
                                       [](const ChunkTransfer& chunk) { return chunk.plan != nullptr; });
    if (!described) {
      return Error{.code = Code::kInvalidArgument,
                   .what = "a job without a tier, or a chunk without a plan",
                   .next_step = "this is a mistake in the calling code"};
    }
    const LaneNumber lane = lane_of(job);
    const bool nothing = job.chunks.empty();
    const MutexLock lock(mutex_);
    if (lane == kRemote && !remote_lane_) {
      return Error{.code = Code::kFailedPrecondition,
                   .what = "the lane of other machines is not open",
                   .next_step = "this is a mistake in the calling code"};
    }
    const auto id = static_cast<JobId>(++last_id_);
    const auto made = jobs_.emplace(id, JobRecord{.id = id, .job = std::move(job), .finished = nothing}).first;
    if (nothing) return id;
    const Status admitted = try_catch([&]() TORPOR_REQUIRES(mutex_) { return lanes_[lane].admit(made->second); });
    if (!admitted) {
      jobs_.erase(made);
      return admitted.error();
    }
    ++open_;
    work_[lane].notify_all();
    return id;
  });
}

JobResult TransferEngine::result_of(JobRecord& record) noexcept {
  JobResult result{.id = record.id, .chunks = std::move(record.job.chunks)};
  for (const ChunkTransfer& chunk : result.chunks) {
    if (chunk.status) continue;
    const bool failed = chunk.outcome == BlockOutcome::kFailed || chunk.outcome == BlockOutcome::kUnproven;
    if (result.status || failed) result.status = copied(chunk.status.error());
    if (failed) break;
  }
  return result;
}

JobResult TransferEngine::wait(JobId id) {
  const MutexLock lock(mutex_);
  while (true) {
    const auto found = jobs_.find(id);
    if (found == jobs_.end()) return {.id = id, .status = Error{.code = Code::kNotFound, .what = "no such job"}};
    if (found->second.finished) {
      JobResult result = result_of(found->second);
      jobs_.erase(found);
      return result;
    }
    if (own_threads_ || !pump_one()) ended_.wait(mutex_);
  }
}

bool TransferEngine::wait_for_result(std::chrono::nanoseconds most) {
  const MutexLock lock(mutex_);
  const auto any_ready = [this]() TORPOR_REQUIRES(mutex_) {
    return std::any_of(jobs_.begin(), jobs_.end(),
                       [](const auto& entry) { return entry.second.finished && entry.second.job.polled; });
  };
  const auto end = std::chrono::steady_clock::now() + most;
  while (!any_ready()) {
    if (!own_threads_) {
      if (!pump_one()) return false;
      continue;
    }
    const auto left = end - std::chrono::steady_clock::now();
    if (left <= std::chrono::nanoseconds::zero()) return false;
    ended_.wait_for(mutex_, left);
  }
  return true;
}

void TransferEngine::wait_ended(std::span<const JobId> jobs) {
  const MutexLock lock(mutex_);
  const auto open = [this](JobId id) TORPOR_REQUIRES(mutex_) {
    const auto found = jobs_.find(id);
    return found != jobs_.end() && !found->second.finished;
  };
  for (const JobId id : jobs) {
    while (open(id)) {
      if (own_threads_ || !pump_one()) ended_.wait(mutex_);
    }
  }
}

size_t TransferEngine::poll(std::vector<JobResult>& finished) {
  const MutexLock lock(mutex_);
  const auto ready = [](const auto& entry) { return entry.second.finished && entry.second.job.polled; };
  const auto count = static_cast<size_t>(std::count_if(jobs_.begin(), jobs_.end(), ready));
  const Status room = try_catch([&] {
    finished.reserve(finished.size() + count);
    return ok();
  });
  if (!room) return 0;  // the results stay for the next call
  for (auto at = jobs_.begin(); at != jobs_.end();) {
    if (ready(*at)) {
      finished.push_back(result_of(at->second));
      at = jobs_.erase(at);
    } else {
      ++at;
    }
  }
  return count;
}

void TransferEngine::drop(JobRecord& record, BlockOutcome outcome) noexcept {
  if (record.finished) return;
  const size_t dropped = lanes_[lane_of(record.job)].drop(record, outcome);
  counts_[static_cast<size_t>(outcome)] += dropped;
  record.ended += dropped;
  if (record.ended < record.job.chunks.size()) return;
  record.finished = true;
  --open_;
  ended_.notify_all();
}

bool TransferEngine::cancel(JobId id) {
  const MutexLock lock(mutex_);
  const auto found = jobs_.find(id);
  if (found == jobs_.end() || found->second.finished) return false;
  const bool untouched = found->second.begun == 0;
  drop(found->second, BlockOutcome::kCancelled);
  return untouched;
}

void TransferEngine::publish_begun(const Batch& batch) const noexcept {
  if (!port_.on()) return;
  uint64_t bytes = 0;
  for (const ChunkTransfer& chunk : batch.chunks) bytes += chunk.plan->bytes();
  (void)port_.record({.type = EventType::kCopy,
                      .from = static_cast<uint8_t>(batch.record->job.kind),
                      .to = static_cast<uint8_t>(Edge::kBegin),
                      .request = static_cast<uint32_t>(lane_of(batch.record->job)),
                      .transfer = batch.record->job.number,
                      .a = batch.chunks.size(),
                      .b = bytes});
}

void TransferEngine::record_result(const Batch& batch, int64_t began, DrainResult drained) noexcept {
  JobRecord& record = *batch.record;
  bool failed = false;
  if (port_.on()) {
    uint64_t bytes = 0;
    Edge edge = Edge::kEnd;
    for (const ChunkTransfer& chunk : batch.chunks) {
      if (chunk.outcome == BlockOutcome::kTransferred) bytes += chunk.plan->bytes();
      if (chunk.outcome != BlockOutcome::kTransferred && edge == Edge::kEnd) edge = Edge::kFailed;
      if (chunk.outcome == BlockOutcome::kUnproven) edge = Edge::kUnproven;
    }
    (void)port_.record({.type = EventType::kCopy,
                        .from = static_cast<uint8_t>(record.job.kind),
                        .to = static_cast<uint8_t>(edge),
                        .request = static_cast<uint32_t>(lane_of(record.job)),
                        .transfer = record.job.number,
                        .a = bytes,
                        .b = static_cast<uint64_t>(port_.now() - began)});
  }
  const std::shared_ptr<ProgressFile>& progress = record.job.progress;
  for (const ChunkTransfer& chunk : batch.chunks) {
    ++counts_[static_cast<size_t>(chunk.outcome)];
    failed = failed || chunk.outcome != BlockOutcome::kTransferred;
    if (progress != nullptr) progress->moved(chunk.plan->bytes());
  }
  if (drained.drain > worst_.drain) worst_ = std::move(drained);
  record.ended += batch.chunks.size();
  const bool cancelled = progress != nullptr && progress->cancelled();
  if (cancelled || (failed && record.job.all_or_nothing)) drop(record, BlockOutcome::kCancelled);
  if (!record.finished && record.ended == record.job.chunks.size()) {
    record.finished = true;
    --open_;
    ended_.notify_all();
  }
}

// Begin a batch before the batch before it is finished, but only of the same job: no job waits for the next one.
void TransferEngine::work(Worker& worker) {
  MutexLock lock(mutex_);
  Batch current;
  int64_t current_began = 0;
  while (true) {
    const Batch next = lanes_[worker.lane].take(current.record);
    worker.busy = next.record != nullptr || current.record != nullptr;
    if (!worker.busy) {
      if (ending_) return;
      if (waiting_for_idle_ > 0) ended_.notify_all();
      work_[worker.lane].wait(mutex_);
      continue;
    }
    lock.unlock();
    const auto begin = [&] {
      const Job& job = next.record->job;
      return worker.copier->begin(job, next.chunks);
    };
    const int64_t next_began = port_.now();
    if (next.record != nullptr) publish_begun(next);
    const bool begun = next.record == nullptr || begin();
    DrainResult drained;
    if (current.record != nullptr) drained = worker.copier->finish();
    if (!begun) (void)begin();  // the finished batch has freed its staging memory
    lock.lock();
    if (current.record != nullptr) record_result(current, current_began, std::move(drained));
    current = next;
    current_began = next_began;
  }
}

bool TransferEngine::pump_one() {
  for (const auto& worker : workers_) {
    if (worker->busy) continue;
    const Batch batch = lanes_[worker->lane].take();
    if (batch.record == nullptr) continue;
    worker->busy = true;
    mutex_.unlock();
    const int64_t began = port_.now();
    publish_begun(batch);
    (void)worker->copier->begin(batch.record->job, batch.chunks);
    DrainResult drained = worker->copier->finish();
    mutex_.lock();
    worker->busy = false;
    record_result(batch, began, std::move(drained));
    ended_.notify_all();  // a thread that waits may find the next batch
    return true;
  }
  return false;
}

bool TransferEngine::pump() {
  const MutexLock lock(mutex_);
  return !own_threads_ && pump_one();
}

DrainResult TransferEngine::drain(bool of_device) {
  const MutexLock lock(mutex_);
  const auto open = [&]() TORPOR_REQUIRES(mutex_) {
    if (!of_device) return open_ > 0;
    return std::any_of(jobs_.begin(), jobs_.end(), [](const auto& entry) {
      const JobKind kind = entry.second.job.kind;
      return !entry.second.finished && kind != JobKind::kMove && kind != JobKind::kFind;
    });
  };
  while (open()) {
    if (own_threads_ || !pump_one()) ended_.wait(mutex_);
  }
  DrainResult worst{worst_.drain, copied(worst_.error).error()};
  if (worst_.drain != Drain::kUnproven) worst_ = {};
  return worst;
}

OutcomeCounts TransferEngine::counts() const {
  const MutexLock lock(mutex_);
  return counts_;
}

void TransferEngine::release_staging() {
  const MutexLock lock(mutex_);
  for (const auto& worker : workers_) {
    if (!worker->busy) worker->copier->release_staging();
  }
}

void TransferEngine::wait_until_idle(const Worker& worker) {
  ++waiting_for_idle_;
  while (worker.busy) ended_.wait(mutex_);
  --waiting_for_idle_;
}

Status TransferEngine::keep_staging(uint64_t batch_bytes) {
  return try_catch([&]() -> Status {
    MutexLock lock(mutex_);
    for (size_t i = 0; i < workers_.size(); ++i) {  // workers_ may grow meanwhile
      Worker& worker = *workers_[i];
      if (worker.lane != kMemory) continue;
      wait_until_idle(worker);
      if (worker.copier->kept_staging() >= batch_bytes) continue;
      lock.unlock();
      std::array<HostArena::Span, 2> kept;  // allocated while the old ones stay: a sleeping engine may need those
      const Status had = try_catch([&]() -> Status {
        for (HostArena::Span& each : kept) {
          TORPOR_ASSIGN_OR_RETURN(each, arena_.allocate(batch_bytes));
        }
        return ok();
      });
      lock.lock();
      TORPOR_RETURN_IF_ERROR(had);
      wait_until_idle(worker);
      worker.copier->keep_staging(std::move(kept));
    }
    return ok();
  });
}

uint64_t TransferEngine::kept_staging() const {
  const MutexLock lock(mutex_);
  uint64_t least = std::numeric_limits<uint64_t>::max();
  for (const auto& worker : workers_) {
    if (worker->lane == kMemory) least = std::min(least, worker->copier->kept_staging());
  }
  return least;
}

void TransferEngine::let_staging_go() {
  const MutexLock lock(mutex_);
  for (const auto& worker : workers_) {
    if (!worker->busy) worker->copier->keep_staging({});
  }
}

uint64_t TransferEngine::most_staging(uint64_t bytes, uint64_t padded_bytes, uint64_t largest_padded) {
  const uint64_t of_a_batch = kMemoryBatchBytes + std::min(padded_bytes - bytes, kBatchChunks * kPage);
  return std::min(padded_bytes, std::max(largest_padded, of_a_batch));
}

}  // namespace torpor
