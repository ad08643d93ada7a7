// SPDX-License-Identifier: Apache-2.0
#include "kvcache/offload_worker.h"

#include <algorithm>

#include <fmt/core.h>

#include "kvcache/offload_job.h"

namespace torpor {
namespace {

Error wrong_plan(std::string what) {
  return {.code = Code::kInvalidArgument,
          .what = fmt::format("a plan of transfers {}", what),
          .next_step = "give the scheduler the options that the ranks have"};
}

}  // namespace

OffloadWorker::OffloadWorker(const OffloadWorkerOptions& options, const KvLayout& layout, TransferEngine& transfers,
                             std::shared_ptr<SlotStore> host, std::unique_ptr<SlotStore> disk,
                             std::unique_ptr<SlotStore> remote)
    : options_(options),
      layout_(layout),
      transfers_(transfers),
      host_(std::move(host)),
      disk_(std::move(disk)),
      remote_(std::move(remote)),
      block_bytes_(layout.bytes_per_block()),
      host_digests_(static_cast<size_t>(slots_of(StoreId::kHost))),
      disk_slots_(options.disk_segments, options.segment_slots, disk_ != nullptr ? disk_->first_slot() : 0) {}

OffloadWorker::~OffloadWorker() { wait(); }

Result<std::unique_ptr<OffloadWorker>> OffloadWorker::create(const OffloadWorkerOptions& options,
                                                             const KvLayout& layout, TransferEngine& transfers,
                                                             std::shared_ptr<SlotStore> host,
                                                             std::unique_ptr<SlotStore> disk,
                                                             std::unique_ptr<SlotStore> remote) {
  return try_catch([&]() -> Result<std::unique_ptr<OffloadWorker>> {
    const uint64_t bytes = layout.bytes_per_block();
    const bool fits =
        (host == nullptr) == (options.host_slots == 0) && (disk == nullptr) == (options.disk_segments == 0) &&
        (remote == nullptr) == (options.remote_slots == 0) &&
        (remote == nullptr || (host != nullptr && remote->traits().shared && remote->traits().record_bytes >= bytes)) &&
        (host == nullptr || (host->traits().in_memory && host->traits().record_bytes >= bytes)) &&
        (disk == nullptr ||
         (disk->traits().slots_per_segment == options.segment_slots && disk->traits().record_bytes >= bytes));
    if (!fits) {
      return Error{.code = Code::kInvalidArgument,
                   .what = fmt::format("the stores of rank {} are not those of {} slots in host memory and {} segments "
                                       "of {} slots, and {} on another machine, for blocks of {} bytes",
                                       options.rank, options.host_slots, options.disk_segments, options.segment_slots,
                                       options.remote_slots, bytes),
                   .next_step = "open them with the same options"};
    }
    if (remote != nullptr) TORPOR_RETURN_IF_ERROR(transfers.open_remote_lane());
    return std::unique_ptr<OffloadWorker>(
        new OffloadWorker(options, layout, transfers, std::move(host), std::move(disk), std::move(remote)));
  });
}

int64_t OffloadWorker::slots_of(StoreId store) const {
  if (store == StoreId::kHost) return options_.host_slots;
  return store == StoreId::kDisk ? int64_t{options_.disk_segments} * options_.segment_slots : options_.remote_slots;
}

void OffloadWorker::open_space(uint32_t space, const Digest& digest, const Digest& shared) {
  if (remote_ != nullptr) remote_->open_space(space, shared);
  for (SlotStore* store : {host_.get(), disk_.get()}) {
    if (store != nullptr) store->open_space(space, digest);
  }
}

// ---- what was there at the start

Result<std::vector<RecoveredBlock>> OffloadWorker::recover(uint32_t space) {
  std::vector<RecoveredBlock> blocks;
  if (disk_ == nullptr || !disk_->traits().durable) return blocks;
  return try_catch([&]() -> Result<std::vector<RecoveredBlock>> {
    TORPOR_ASSIGN_OR_RETURN(recovered_, disk_->recover(space));
    disk_slots_.note_recovered(recovered_);
    for (const RecoveredSlot& each : recovered_) {
      if (each.record.bytes == block_bytes_) blocks.push_back({each.key, each.slot / options_.segment_slots});
    }
    return blocks;
  });
}

void OffloadWorker::adopt(std::span<const AdoptedBlock> blocks) {
  std::map<BlockKey, StoreSlot, BlockKeyLess> found;  // the newest record of a key wins
  for (const RecoveredSlot& each : std::exchange(recovered_, {})) {
    if (each.record.bytes == block_bytes_) found[each.key] = each.slot;
  }
  for (const AdoptedBlock& block : blocks) {
    const auto known = found.find(block.key);
    if (known == found.end() || block.slot < 0 || block.slot >= slots_of(StoreId::kDisk)) continue;
    disk_slots_.adopt(block.slot, known->second);
  }
  if (const std::vector<SlotRange> ranges = disk_slots_.take_unadopted(); !ranges.empty()) disk_->drop(ranges);
}

// ---- plans

Status OffloadWorker::check(const TransferPlan& plan) const {
  const auto within = [&](const std::vector<int32_t>& numbers, const PlannedJob& job, int64_t end) {
    return std::all_of(numbers.begin() + job.first, numbers.begin() + job.first + job.count,
                       [end](int32_t number) { return number >= 0 && number < end; });
  };
  for (const Dropped& each : plan.dropped) {
    const int64_t end = each.store == StoreId::kDisk   ? options_.disk_segments
                        : each.store == StoreId::kHost ? slots_of(each.store)
                                                       : 0;
    if (each.number < 0 || each.number >= end)
      return wrong_plan(fmt::format("drops number {} of the store {}", each.number, name(each.store)));
  }
  size_t keys = 0;
  for (const PlannedJob& job : plan.jobs) {
    if (job.first + uint64_t{job.count} > std::min(plan.from.size(), plan.to.size()))
      return wrong_plan("has a job without blocks");
    const int64_t blocks = layout_.num_blocks;
    const int64_t from = job.kind == PlanKind::kPut ? blocks : slots_of(job.store);
    const int64_t to = job.of_load() ? blocks : slots_of(job.target());
    if (!within(plan.from, job, from) || !within(plan.to, job, to))
      return wrong_plan(
          fmt::format("has a {} with a block or slot that rank {} does not have", name(job.kind), options_.rank));
    if (job.kind == PlanKind::kMove && job.store == StoreId::kHost && job.other == StoreId::kHost)
      return wrong_plan("moves blocks within host memory");
    keys += job.keyed() ? job.count : 0;
  }
  return keys == plan.keys.size() ? ok() : Status(wrong_plan("has other keys than its jobs need"));
}

// All memory that a plan needs, allocated before its first step: after that its jobs are sure to end.
struct OffloadWorker::Noted {
  RunningJobs jobs;
  std::map<std::string, Loading> loading;
  std::multimap<uint64_t, std::string> loads_of;
  std::vector<SlotRange> host;    // capacity for dropped host slots
  std::vector<int64_t> segments;  // capacity for dropped segments of the store
  std::vector<SlotRange> disk;
};

OffloadWorker::Noted OffloadWorker::note(const TransferPlan& plan) const {
  Noted noted;
  for (const PlannedJob& planned : plan.jobs) {
    const auto part = [&](const std::vector<int32_t>& all) {
      const auto first = all.begin() + planned.first;
      return std::vector<int32_t>(first, first + planned.count);
    };
    noted.jobs.push_back(
        std::make_unique<OffloadJob>(OffloadJob{.planned = planned, .from = part(plan.from), .to = part(plan.to)}));
  }
  for (const PlannedLoad& load : plan.loading) {
    Loading& loading = noted.loading[load.request];
    loading.ended.request = load.request;
    ++loading.jobs;
    noted.loads_of.emplace(load.job, load.request);
  }
  noted.host.reserve(plan.dropped.size());
  noted.segments.reserve(disk_slots_.most_gone(plan.dropped.size()));
  noted.disk.reserve(noted.segments.capacity());
  return noted;
}

void OffloadWorker::take(Noted& noted) noexcept {
  for (const auto& [request, loading] : noted.loading) {
    if (const auto known = loading_.find(request); known != loading_.end()) known->second.jobs += loading.jobs;
  }
  loading_.merge(noted.loading);
  loads_of_.merge(noted.loads_of);
  refused_.splice(refused_.end(), noted.jobs);
}

Status OffloadWorker::run(const TransferPlan& plan) {
  return try_catch([&]() -> Status {
    if (plan.number != 0 && plan.number <= last_plan_) return ok();
    TORPOR_RETURN_IF_ERROR(check(plan));
    Noted noted = note(plan);
    if (plan.jobs.empty()) {
      last_plan_ = plan.number;
      drop(plan.dropped, noted);
      return ok();
    }
    const bool loads = std::any_of(plan.jobs.begin(), plan.jobs.end(),
                                   [](const PlannedJob& job) { return job.kind == PlanKind::kGet; });
    const std::shared_ptr<EarlierWork> earlier = loads ? std::make_shared<EarlierWork>() : nullptr;
    auto next = noted.jobs.begin();
    last_plan_ = plan.number;
    take(noted);
    drop(plan.dropped, noted);
    size_t key = 0;
    for (const PlannedJob& planned : plan.jobs) {
      const size_t keys = planned.keyed() ? planned.count : 0;
      begin(next++, std::span(plan.keys).subspan(key, keys), earlier);
      key += keys;
    }
    return ok();
  });
}

// Allocates nothing: `noted` has the capacity.
void OffloadWorker::drop(std::span<const Dropped> dropped, Noted& noted) {
  for (const Dropped& each : dropped) {
    if (each.store == StoreId::kHost) {
      noted.host.push_back({.first = each.number});
      continue;
    }
    disk_slots_.release_segment(each.number, noted.segments);
  }
  if (!noted.host.empty()) host_->drop(noted.host);
  disk_slots_.add_ranges(noted.segments, noted.disk);
  if (!noted.disk.empty()) disk_->drop(noted.disk);
}

StoreSlot OffloadWorker::slot_to_read(StoreId store, Slot slot) const {
  return store == StoreId::kDisk ? disk_slots_.slot_to_read(slot) : slot;
}

StoreSlot OffloadWorker::slot_to_write(StoreId store, Slot slot) {
  return store == StoreId::kDisk ? disk_slots_.slot_to_write(slot) : slot;
}

Job OffloadWorker::make_job(std::span<const BlockKey> keys, OffloadJob& running) {
  const PlannedJob& planned = running.planned;
  const std::span<const int32_t> from = running.from;
  const std::span<const int32_t> to = running.to;
  const bool find = planned.kind == PlanKind::kFind;
  const bool get = planned.kind == PlanKind::kGet || find;
  const bool put = planned.kind == PlanKind::kPut;
  const bool move = planned.kind == PlanKind::kMove;
  running.keys.assign(keys.begin(), keys.end());
  Job job{.kind = find   ? JobKind::kFind
                  : get  ? JobKind::kRestore
                  : move ? JobKind::kMove
                         : JobKind::kSave,
          .store = store(planned.target()),
          .source = move ? store(planned.store) : nullptr,
          .priority = planned.priority,
          .polled = true,
          .number = planned.id};
  running.plans.reserve(planned.count);
  job.chunks.reserve(planned.count);
  const std::string tag = fmt::format("job {}", planned.id);  // for error texts
  for (uint32_t i = 0; i < planned.count; ++i) {
    ChunkPlan& chunk = running.plans.emplace_back();
    chunk.key = {.kind = ChunkKind::kKvBlock, .tag = tag, .index = i};
    if (find) {
      chunk.pieces.clear();
    } else if (move) {
      chunk.pieces.push_back({.bytes = block_bytes_});
    } else {
      chunk.pieces = layout_.pieces_of(static_cast<uint32_t>(get ? to[i] : from[i]));
    }
    ChunkTransfer& transfer = job.chunks.emplace_back();
    transfer.plan = &chunk;
    transfer.saved = {.key = chunk.key, .bytes = block_bytes_, .stored_bytes = block_bytes_};
    if (!put) transfer.saved.offset = static_cast<uint64_t>(slot_to_read(planned.store, from[i]));
    if (!running.keys.empty()) transfer.key = &running.keys[i];
    if (!put && planned.store == StoreId::kHost) transfer.saved.digest = host_digests_[static_cast<size_t>(from[i])];
  }
  for (uint32_t i = 0; i < planned.count && !get; ++i) job.chunks[i].slot = slot_to_write(planned.target(), to[i]);
  return job;
}

// Submit one job. An error here fails the job's blocks, which are reported like any others.
void OffloadWorker::begin(RunningJob at, std::span<const BlockKey> keys, const std::shared_ptr<EarlierWork>& earlier) {
  OffloadJob& begun = **at;
  begun.refused = try_catch([&]() -> Status {
    if (begun.planned.kind == PlanKind::kSkip)
      return Error{.code = Code::kAborted, .what = "the load was cancelled", .next_step = "compute its tokens"};
    Job job = make_job(keys, begun);
    if (begun.planned.kind == PlanKind::kGet) job.after = earlier;
    std::map<JobId, std::unique_ptr<OffloadJob>> made;
    const auto node = made.emplace(JobId::kNone, nullptr).first;
    TORPOR_ASSIGN_OR_RETURN(const JobId id, transfers_.submit(std::move(job)));
    auto handle = made.extract(node);
    handle.key() = id;
    handle.mapped() = std::move(*at);
    running_.insert(std::move(handle));
    return ok();
  });
  if (begun.refused) refused_.erase(at);
}

}  // namespace torpor
