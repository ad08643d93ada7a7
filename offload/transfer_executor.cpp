#include "offload/transfer_executor.h"

#include <algorithm>
#include <thread>

#include <fmt/format.h>

#include "base/log.h"
#include "base/units.h"

namespace torpor {
namespace {

void fail_all(std::span<ChunkTransfer> batch, const Error& error, bool unproven = false) {
  for (ChunkTransfer& transfer : batch) {
    transfer.status = error;
    transfer.unproven = transfer.unproven || unproven;
  }
}

}  // namespace

struct TransferExecutor::Worker {
  StreamId stream{};
  HostArena::Span staging;
};

// A worker for the time of one batch.
struct TransferExecutor::Borrowed {
  explicit Borrowed(TransferExecutor& executor) : executor(executor) {
    const MutexLock lock(executor.mutex_);
    while (executor.idle_.empty()) executor.returned_.wait(executor.mutex_);
    worker = executor.idle_.back();
    executor.idle_.pop_back();
  }
  ~Borrowed() {
    {
      const MutexLock lock(executor.mutex_);
      executor.idle_.push_back(worker);
    }
    executor.returned_.notify_one();
  }
  TransferExecutor& executor;
  Worker* worker;
};

TransferExecutor::TransferExecutor(DeviceMemory& device, HostArena& arena, std::vector<std::unique_ptr<Worker>> workers)
    : device_(device),
      arena_(arena),
      workers_(std::move(workers)),
      unproven_digests_(new std::vector<std::vector<StreamingDigest>>()) {
  idle_.reserve(workers_.size());  // a worker always comes back
  for (const auto& worker : workers_) idle_.push_back(worker.get());
}

Result<std::unique_ptr<TransferExecutor>> TransferExecutor::create(DeviceMemory& device, HostArena& arena,
                                                                   TransferExecutorOptions options) {
  if (options.threads < 0) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("threads is {}", options.threads),
                 .next_step = "use 0 for the machine's own number"};
  }
  const int threads = options.threads != 0 ? options.threads
                                           : static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 8u));
  std::vector<std::unique_ptr<Worker>> workers;
  workers.reserve(static_cast<size_t>(threads));
  for (int i = 0; i < threads; ++i) {
    auto worker = std::make_unique<Worker>();
    Result<StreamId> stream = device.create_stream();
    if (!stream) {
      for (const auto& made : workers) {
        if (const Status done = device.destroy_stream(made->stream); !done)
          log().error("stream: {}", done.error().to_string());
      }
      return stream.error();
    }
    worker->stream = *stream;
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
    if (const Status done = device_.destroy_stream(worker->stream); !done)
      log().error("stream: {}", done.error().to_string());
  }
  if (!quarantined_) {
    delete unproven_digests_;
    return;
  }
  (void)catching([this]() -> Status {  // they stay until the process ends, and can be seen to be meant to
    static std::mutex mutex;
    static auto* const kept = new std::vector<const void*>();
    const std::lock_guard lock(mutex);
    kept->push_back(unproven_digests_);
    return ok();
  });
}

Status TransferExecutor::usable() const {
  if (!quarantined_) return ok();
  return Error{.code = Code::kDevice,
               .what = "an earlier copy was never proven finished; its memory is quarantined",
               .next_step = "end this process; what was saved can be woken in a new one",
               .origin = Origin::kDevice};
}

void TransferExecutor::release_staging() {
  if (quarantined_) return;
  const MutexLock lock(mutex_);
  for (Worker* worker : idle_) worker->staging = {};
}

Result<std::vector<std::span<std::byte>>> TransferExecutor::stage(Worker& worker,
                                                                  std::span<const ChunkTransfer> batch) {
  uint64_t bytes = 0;
  for (const ChunkTransfer& transfer : batch) bytes += align_up(transfer.saved.bytes, kPage);
  if (worker.staging.bytes().size() < bytes) {
    worker.staging = {};
    TORPOR_ASSIGN(worker.staging, arena_.allocate(bytes));
  }
  std::vector<std::span<std::byte>> host;
  uint64_t at = 0;
  for (const ChunkTransfer& transfer : batch) {
    host.push_back(worker.staging.bytes().subspan(at, transfer.saved.bytes));
    at += align_up(transfer.saved.bytes, kPage);
  }
  return host;
}

Status TransferExecutor::copy(Worker& worker, Direction direction, std::span<const ChunkPlan* const> plans,
                              std::span<const std::span<std::byte>> host, std::vector<Digest>* digests,
                              bool& unproven) {
  TORPOR_TRY(usable());
  std::vector<StreamingDigest> streaming(digests != nullptr && device_.takes_digests() ? plans.size() : 0);
  std::vector<Copy> copies;
  for (size_t i = 0; i < plans.size(); ++i) {
    uint64_t at = 0;
    for (const DevicePiece& piece : plans[i]->pieces) {
      copies.push_back({piece.address, host[i].data() + at, piece.bytes, streaming.empty() ? nullptr : &streaming[i]});
      at += piece.bytes;
    }
  }
  const std::string doing = fmt::format("copying {}{}", plans[0]->key.to_string(),
                                        plans.size() > 1 ? fmt::format(" and {} more", plans.size() - 1) : "");
  if (!streaming.empty()) {  // room for what a copy that is never proven would go on writing
    const MutexLock lock(mutex_);
    unproven_digests_->reserve(unproven_digests_->size() + workers_.size());
  }
  // From here on nothing but the wait may end this: a copy may be running.
  const Status enqueued = catching([&] { return device_.copy_async(worker.stream, direction, copies); });
  // Even a refused batch may have begun: wait for the stream in any case.
  DrainResult drained{.drain = Drain::kUnproven};
  Status waited = catching([&] {
    Result<EventId> event = device_.record(worker.stream);
    if (event) {
      drained = device_.wait(*event);
    } else {
      drained = device_.drain(worker.stream);
      if (drained.drain == Drain::kCompleted) drained = {Drain::kDrainedWithError, event.error()};
    }
    return ok();
  });
  if (!waited) {
    drained = {Drain::kUnproven, std::move(waited).error()};
    (void)catching([&] {  // where that throws too, it stays unproven
      if (device_.drain(worker.stream).drain == Drain::kCompleted) drained.drain = Drain::kDrainedWithError;
      return ok();
    });
  }
  if (drained.drain == Drain::kUnproven) {
    unproven = true;
    quarantined_ = true;
    const MutexLock lock(mutex_);
    if (!streaming.empty()) unproven_digests_->push_back(std::move(streaming));
  }
  if (drained.drain != Drain::kCompleted) return drained.error.within(doing);
  if (!enqueued) return enqueued.error().within(doing);
  if (digests == nullptr) return ok();
  digests->clear();
  for (size_t i = 0; i < plans.size(); ++i)
    digests->push_back(streaming.empty() ? digest_of(host[i]) : streaming[i].finish());
  return ok();
}

void TransferExecutor::copy_each(Worker& worker, Direction direction, std::span<ChunkTransfer> batch,
                                 std::span<const std::span<std::byte>> host) {
  std::vector<const ChunkPlan*> plans;
  std::vector<std::span<std::byte>> places;
  std::vector<size_t> members;
  for (size_t i = 0; i < batch.size(); ++i) {
    if (!batch[i].status) continue;
    plans.push_back(batch[i].plan);
    places.push_back(host[i]);
    members.push_back(i);
  }
  if (plans.empty()) return;
  bool unproven = false;
  std::vector<Digest> digests;
  std::vector<Digest>* const wanted = direction == Direction::kDeviceToHost ? &digests : nullptr;
  const Status together = copy(worker, direction, plans, places, wanted, unproven);
  for (size_t m = 0; m < digests.size(); ++m) batch[members[m]].saved.digest = digests[m];
  if (together) return;
  for (size_t m = 0; m < members.size(); ++m) {
    ChunkTransfer& transfer = batch[members[m]];
    transfer.unproven = unproven;
    transfer.status = unproven || members.size() == 1
                          ? together
                          : copy(worker, direction, {&plans[m], 1}, {&places[m], 1}, wanted, transfer.unproven);
    if (transfer.status && !digests.empty()) transfer.saved.digest = digests[0];
  }
}

void TransferExecutor::save(std::span<ChunkTransfer> batch, Tier& target) {
  const Borrowed borrowed(*this);
  const Status done = catching([&] {
    save_now(*borrowed.worker, batch, target);
    return ok();
  });
  if (!done) fail_all(batch, done.error(), quarantined_);
}

void TransferExecutor::restore(std::span<ChunkTransfer> batch, Tier& source) {
  const Borrowed borrowed(*this);
  const Status done = catching([&] {
    restore_now(*borrowed.worker, batch, source);
    return ok();
  });
  if (!done) fail_all(batch, done.error(), quarantined_);
}

void TransferExecutor::digest(std::span<ChunkTransfer> batch) {
  const Borrowed borrowed(*this);
  const Status done = catching([&] {
    digest_now(*borrowed.worker, batch);
    return ok();
  });
  if (!done) fail_all(batch, done.error(), quarantined_);
}

void TransferExecutor::save_now(Worker& worker, std::span<ChunkTransfer> batch, Tier& target) {
  if (const Status can = usable(); !can) return fail_all(batch, can.error());
  std::vector<std::span<std::byte>> host;
  for (ChunkTransfer& transfer : batch) {
    transfer.saved = {.key = transfer.plan->key, .bytes = transfer.plan->bytes()};
    transfer.status = ok();
    if (!target.addressable()) continue;
    const Result<std::span<std::byte>> place = target.place(transfer.saved);
    if (!place) transfer.status = place.error();
    host.push_back(place ? *place : std::span<std::byte>{});
  }
  if (!target.addressable()) {
    Result<std::vector<std::span<std::byte>>> staged = stage(worker, batch);
    if (!staged) return fail_all(batch, staged.error());
    host = std::move(*staged);
  }
  copy_each(worker, Direction::kDeviceToHost, batch, host);
  if (target.addressable()) return;
  std::vector<TierPart> parts;
  std::vector<size_t> members;
  for (size_t i = 0; i < batch.size(); ++i) {
    if (!batch[i].status) continue;
    parts.push_back({&batch[i].saved, host[i], ok()});
    members.push_back(i);
  }
  target.put(parts);
  for (size_t m = 0; m < members.size(); ++m) batch[members[m]].status = std::move(parts[m].status);
}

void TransferExecutor::restore_now(Worker& worker, std::span<ChunkTransfer> batch, Tier& source) {
  if (const Status can = usable(); !can) return fail_all(batch, can.error());
  std::vector<std::span<std::byte>> host;
  if (source.addressable()) {
    for (ChunkTransfer& transfer : batch) host.push_back(source.view(transfer.saved));
  } else {
    Result<std::vector<std::span<std::byte>>> staged = stage(worker, batch);
    if (!staged) return fail_all(batch, staged.error());
    host = std::move(*staged);
    std::vector<TierPart> parts;
    for (size_t i = 0; i < batch.size(); ++i) parts.push_back({&batch[i].saved, host[i], ok()});
    source.get(parts);
    for (size_t i = 0; i < batch.size(); ++i) batch[i].status = std::move(parts[i].status);
  }
  for (size_t i = 0; i < batch.size(); ++i) {
    ChunkTransfer& transfer = batch[i];
    if (source.addressable()) transfer.status = ok();
    if (!transfer.status) continue;
    if (host[i].size() != transfer.saved.bytes) {
      transfer.status =
          Error{.code = Code::kInternal,
                .what = fmt::format("{} is not in the {} tier", transfer.saved.key.to_string(), source.kind())};
    } else if (digest_of(host[i]) != transfer.saved.digest) {
      transfer.status = Error{.code = Code::kCorruption,
                              .what = fmt::format("the saved bytes of {} do not match their digest {}",
                                                  transfer.saved.key.to_string(), transfer.saved.digest.hex()),
                              .next_step = "use another checkpoint"};
    }
  }
  copy_each(worker, Direction::kHostToDevice, batch, host);
}

void TransferExecutor::digest_now(Worker& worker, std::span<ChunkTransfer> batch) {
  if (const Status can = usable(); !can) return fail_all(batch, can.error());
  for (ChunkTransfer& transfer : batch) {
    transfer.saved = {.key = transfer.plan->key, .bytes = transfer.plan->bytes()};
    transfer.status = ok();
  }
  const Result<std::vector<std::span<std::byte>>> host = stage(worker, batch);
  if (!host) return fail_all(batch, host.error());
  copy_each(worker, Direction::kDeviceToHost, batch, *host);
}

}  // namespace torpor
