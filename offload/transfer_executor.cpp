#include "offload/transfer_executor.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <thread>

#include <fmt/format.h>

#include "base/log.h"

namespace torpor {

struct TransferExecutor::Worker {
  StreamId stream{};
  HostArena::Span staging;  // of the operation in progress
};

TransferExecutor::TransferExecutor(DeviceMemory& device, HostArena& arena, std::vector<std::unique_ptr<Worker>> workers)
    : device_(device), arena_(arena), workers_(std::move(workers)) {}

Result<std::unique_ptr<TransferExecutor>> TransferExecutor::create(DeviceMemory& device, HostArena& arena, TransferExecutorOptions options) {
  if (options.threads < 0) {
    return Error{.code = Code::kInvalidArgument, .what = fmt::format("threads is {}", options.threads), .next_step = "use 0 for the machine's own number"};
  }
  const int threads = options.threads != 0 ? options.threads : static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 8u));
  std::vector<std::unique_ptr<Worker>> workers;
  for (int i = 0; i < threads; ++i) {
    auto worker = std::make_unique<Worker>();
    TORPOR_ASSIGN(worker->stream, device.create_stream());
    workers.push_back(std::move(worker));
  }
  return std::unique_ptr<TransferExecutor>(new TransferExecutor(device, arena, std::move(workers)));
}

TransferExecutor::~TransferExecutor() {
  for (const auto& worker : workers_) {
    if (quarantined_) {
      HostArena::quarantine(std::move(worker->staging));
      continue;
    }
    if (const Status done = device_.destroy_stream(worker->stream); !done) log().error("stream: {}", done.error().to_string());
  }
}

Status TransferExecutor::usable() const {
  if (!quarantined_) return ok();
  return Error{.code = Code::kDevice,
               .what = "an earlier copy was never proven finished; its memory is quarantined",
               .next_step = "end this process; what was saved can be woken in a new one",
               .origin = Origin::kDevice};
}

Status TransferExecutor::for_each_chunk(uint64_t count, uint64_t staging_bytes, const std::function<Status(Worker&, uint64_t)>& work) {
  TORPOR_TRY(usable());
  const uint64_t used = std::min<uint64_t>(workers_.size(), count);
  for (uint64_t i = 0; i < used && staging_bytes > 0; ++i) {
    TORPOR_ASSIGN(workers_[i]->staging, arena_.allocate(staging_bytes));
  }
  std::atomic<uint64_t> next = 0;
  std::mutex mutex;
  std::optional<Error> first;  // guarded by mutex
  const auto run = [&](Worker& worker) {
    for (uint64_t index = next++; index < count; index = next++) {
      if (Status done = work(worker, index); !done) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::move(done).error();
        next = count;
        return;
      }
    }
  };
  std::vector<std::thread> threads;
  for (uint64_t i = 1; i < used; ++i) threads.emplace_back(run, std::ref(*workers_[i]));
  if (used > 0) run(*workers_[0]);
  for (std::thread& thread : threads) thread.join();
  if (!quarantined_) {
    for (const auto& worker : workers_) worker->staging = {};
  }
  if (first) return std::move(*first);
  return ok();
}

Status TransferExecutor::copy(Worker& worker, Direction direction, const ChunkPlan& plan, std::span<std::byte> host) {
  std::vector<Copy> copies;
  copies.reserve(plan.pieces.size());
  uint64_t at = 0;
  for (const DevicePiece& piece : plan.pieces) {
    copies.push_back({piece.address, host.data() + at, piece.bytes});
    at += piece.bytes;
  }
  const Status enqueued = device_.copy_async(worker.stream, direction, copies);
  // Even a refused batch may have begun: wait for the stream in any case.
  Result<EventId> event = device_.record(worker.stream);
  if (!event) {
    quarantined_ = true;
    return event.error().within(fmt::format("copying {}", plan.key.to_string()));
  }
  DrainResult drained = device_.wait(*event);
  if (drained.drain == Drain::kUnproven) quarantined_ = true;
  if (drained.drain != Drain::kCompleted) return drained.error.within(fmt::format("copying {}", plan.key.to_string()));
  if (!enqueued) return enqueued.error().within(fmt::format("copying {}", plan.key.to_string()));
  return ok();
}

Result<std::vector<SavedChunk>> TransferExecutor::save(std::span<const ChunkPlan> plans, Tier& target) {
  std::vector<SavedChunk> saved(plans.size());
  uint64_t total = 0;
  uint64_t largest = 0;
  for (size_t i = 0; i < plans.size(); ++i) {
    saved[i].key = plans[i].key;
    saved[i].bytes = plans[i].bytes();
    total += saved[i].bytes;
    largest = std::max(largest, saved[i].bytes);
  }
  TORPOR_TRY(target.prepare(total, plans.size()));
  const bool stages = target.kind() != "host";
  TORPOR_TRY(for_each_chunk(plans.size(), stages ? largest : 0, [&](Worker& worker, uint64_t i) -> Status {
    SavedChunk& chunk = saved[i];
    TORPOR_ASSIGN(std::span<std::byte> host, target.place(chunk));
    const bool placed = !host.empty();
    if (!placed) host = worker.staging.bytes().first(chunk.bytes);
    TORPOR_TRY(copy(worker, Direction::kDeviceToHost, plans[i], host));
    chunk.digest = digest_of(host);
    return placed ? ok() : target.put(chunk, host);
  }));
  TORPOR_TRY(target.finish());
  return saved;
}

Status TransferExecutor::restore(std::span<const SavedChunk> saved, std::span<const ChunkPlan> plans, Tier& source) {
  uint64_t largest = 0;
  for (size_t i = 0; i < plans.size(); ++i) {
    if (i >= saved.size() || saved[i].key != plans[i].key || saved[i].bytes != plans[i].bytes()) {
      return Error{.code = Code::kIncompatible,
                   .what = fmt::format("{} was not saved, or with another size", plans[i].key.to_string()),
                   .next_step = "wake it into the engine configuration that saved it"};
    }
    largest = std::max(largest, saved[i].bytes);
  }
  const bool stages = source.kind() != "host";
  return for_each_chunk(plans.size(), stages ? largest : 0, [&](Worker& worker, uint64_t i) -> Status {
    const SavedChunk& chunk = saved[i];
    std::span<std::byte> host = source.view(chunk);
    if (host.empty()) {
      if (!stages) return Error{.code = Code::kInternal, .what = fmt::format("{} is not in the host tier", chunk.key.to_string())};
      host = worker.staging.bytes().first(chunk.bytes);
      TORPOR_TRY(source.get(chunk, host));
    }
    if (digest_of(host) != chunk.digest) {
      return Error{.code = Code::kCorruption,
                   .what = fmt::format("the saved bytes of {} do not match their digest {}", chunk.key.to_string(), chunk.digest.hex()),
                   .next_step = "use another checkpoint"};
    }
    return copy(worker, Direction::kHostToDevice, plans[i], host);
  });
}

Result<std::vector<Digest>> TransferExecutor::digests(std::span<const ChunkPlan> plans) {
  std::vector<Digest> digests(plans.size());
  uint64_t largest = 0;
  for (const ChunkPlan& plan : plans) largest = std::max(largest, plan.bytes());
  TORPOR_TRY(for_each_chunk(plans.size(), largest, [&](Worker& worker, uint64_t i) -> Status {
    const std::span<std::byte> host = worker.staging.bytes().first(plans[i].bytes());
    TORPOR_TRY(copy(worker, Direction::kDeviceToHost, plans[i], host));
    digests[i] = digest_of(host);
    return ok();
  }));
  return digests;
}

}  // namespace torpor
