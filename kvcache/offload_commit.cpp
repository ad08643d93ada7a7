// SPDX-License-Identifier: Apache-2.0
// OffloadScheduler: commits batches in a step, and ends them when the ranks have reported.
#include <algorithm>
#include <optional>

#include <fmt/core.h>

#include "kvcache/offload_scheduler.h"

namespace torpor {
namespace {

// With fewer segments, a segment that is read for a reinsertion would block writes.
constexpr int32_t kFewSegments = 3;
constexpr size_t kJobsOfABatch = kStores;  // one for each store
constexpr uint64_t kBatchBits = 16;        // lower bits of a job's id: index in batches_; upper bits: running number

// Return the worse of two ranks' outcomes for a block.
BlockOutcome worse(BlockOutcome a, BlockOutcome b) {
  for (const BlockOutcome outcome : {BlockOutcome::kUnproven, BlockOutcome::kDamaged}) {
    if (a == outcome || b == outcome) return outcome;
  }
  return a == BlockOutcome::kTransferred ? b : a;
}

}  // namespace

const TransferPlan& OffloadScheduler::plan_step(bool flush) { return plan(flush, false); }

const TransferPlan& OffloadScheduler::plan_device() { return plan(true, true); }

const TransferPlan& OffloadScheduler::plan(bool flush, bool of_device) {
  plan_.clear();
  queue_.sweep_if_due(clock_.now());
  // If memory runs out, the rest stays queued for the next step.
  (void)try_catch([&]() -> Status {
    queue_.set_held_aside(clock_.now());
    commit_onboards(flush);
    commit_offloads(flush);
    if (of_device) return ok();
    commit_moves_from_host(Way::kDemote, StoreId::kDisk, flush);
    commit_moves_from_host(Way::kPublish, StoreId::kRemote, flush);
    commit_prefetches(flush);
    commit_lookups();
    commit_reinsertions();
    return ok();
  });
  within_step_ = 0;
  plan_.dropped = index_->reports().take_dropped();
  if (!plan_.empty()) plan_.number = ++plans_;
  if (port_.on()) publish_stores();
  return plan_;
}

// Allocate all memory for a batch of so many blocks before it is committed, so that nothing fails afterwards.
void OffloadScheduler::make_room(size_t blocks, size_t owners) {
  grow(blocks_, blocks);
  grow(versions_, blocks);
  grow(held_, blocks);
  grow(plan_.jobs, plan_.jobs.size() + kJobsOfABatch);
  grow(plan_.from, plan_.from.size() + blocks);
  grow(plan_.to, plan_.to.size() + blocks);
  grow(plan_.keys, plan_.keys.size() + blocks);
  grow(plan_.loading, plan_.loading.size() + kJobsOfABatch);
  while (free_batches_.size() < kJobsOfABatch) {
    grow(free_batches_, batches_.size() + 1);
    batches_.emplace_back();
    free_batches_.push_back(static_cast<uint32_t>(batches_.size()) - 1);
  }
  for (size_t i = free_batches_.size() - kJobsOfABatch; i < free_batches_.size(); ++i) {
    grow(batches_[free_batches_[i]].blocks, blocks);
    grow(batches_[free_batches_[i]].owners, owners);
  }
}

// Precondition: make_room() was called.
OffloadScheduler::PlannedBatch& OffloadScheduler::new_batch(Way way, StoreId store) {
  const uint32_t place = free_batches_.back();
  free_batches_.pop_back();
  PlannedBatch& batch = batches_[place];
  batch.id = ++planned_ << kBatchBits | place;
  batch.way = way;
  batch.store = store;
  batch.from = StoreId::kHost;
  batch.reported = 0;
  batch.blocks.clear();
  batch.owners.clear();
  batch.cause = ok();
  return batch;
}

OffloadScheduler::PlannedBatch* OffloadScheduler::planned(uint64_t id) {
  const uint64_t place = id & ((uint64_t{1} << kBatchBits) - 1);
  return place < batches_.size() && batches_[place].id == id ? &batches_[place] : nullptr;
}

// ---- commitment

// Plan each load as one job for each store that it reads from.
void OffloadScheduler::commit_onboards(bool flush) {
  for (OffloadQueue::Next next; (next = queue_.next(Way::kOnboard, clock_.now(), flush)).blocks > 0;) {
    make_room(next.blocks, next.containers);
    for (std::string& name : names_) name = at(next.owner).id;
    queue_.commit(Way::kOnboard, next, batch_);
    at(next.owner).load_cancelled = next.skip;
    at(next.owner).planned = true;
    for (const StoreId store : {StoreId::kHost, StoreId::kDisk, StoreId::kRemote}) {
      PlannedBatch* batch = nullptr;
      for (size_t i = 0; i < batch_.blocks.size(); ++i) {
        if (batch_.blocks[i].store != store) continue;
        if (batch == nullptr) batch = &new_batch(Way::kOnboard, store);
        batch->blocks.push_back({.queued = batch_.blocks[i], .at = static_cast<int32_t>(i)});
      }
      if (batch == nullptr) continue;
      OffloadQueue::Owner owner = batch_.owners.front();
      owner.count = static_cast<uint32_t>(batch->blocks.size());
      batch->request = owner.ticket->owner;
      batch->owners.push_back(std::move(owner));
      plan(*batch, next.skip ? PlanKind::kSkip : PlanKind::kGet);
      std::string& name = names_[static_cast<size_t>(store)];
      if (!name.empty()) plan_.loading.push_back({std::move(name), batch->id});
    }
  }
}

void OffloadScheduler::commit_offloads(bool flush) {
  for (OffloadQueue::Next next; (next = queue_.next(Way::kOffload, clock_.now(), flush)).blocks > 0;) {
    make_room(next.blocks, next.containers);
    queue_.commit(Way::kOffload, next, batch_);
    for (const StoreId store : {StoreId::kHost, StoreId::kDisk}) commit_offloads_to(store);
  }
}

// Hold the blocks of the batch that go into this store, and reserve a slot for each. End the others here.
void OffloadScheduler::commit_offloads_to(StoreId store) {
  blocks_.clear();
  versions_.clear();
  for (const QueuedBlock& block : batch_.blocks) {
    if (block.store != store) continue;
    blocks_.push_back(block.block);
    versions_.push_back(block.version);
    index_->prefetch(block.key);
  }
  if (blocks_.empty()) return;
  held_.assign(blocks_.size(), 0);
  if (options_.mode == OffloadMode::kEager) {
    device_.hold(blocks_, versions_, held_);
  } else {
    for (size_t i = 0; i < blocks_.size(); ++i) held_[i] = device_.version(blocks_[i]) == versions_[i] ? 1 : 0;
  }
  PlannedBatch* batch = nullptr;
  size_t block = 0;
  size_t held = 0;
  for (const OffloadQueue::Owner& owner : batch_.owners) {
    uint32_t taken = 0;
    for (uint32_t i = 0; i < owner.count; ++i, ++block) {
      const QueuedBlock& queued = batch_.blocks[block];
      if (queued.store != store) continue;
      Slot slot = -1;
      const size_t number = held++;
      const BlockOutcome outcome = held_[number] == 0 ? BlockOutcome::kEvicted : reserve(queued, store, slot);
      if (outcome != BlockOutcome::kTransferred) {
        if (held_[number] != 0 && options_.mode == OffloadMode::kEager) device_.release({&queued.block, 1});
        queue_.end(owner.ticket, Way::kOffload, outcome, 1);
        continue;
      }
      if (batch == nullptr) batch = &new_batch(Way::kOffload, store);
      batch->blocks.push_back({.queued = queued});
      batch->blocks.back().queued.slot = slot;
      ++taken;
    }
    if (taken > 0) batch->owners.push_back({owner.ticket, taken});
  }
  if (batch != nullptr) plan(*batch, PlanKind::kPut);
}

BlockOutcome OffloadScheduler::reserve(const QueuedBlock& block, StoreId store, Slot& slot) {
  if (!accepting(store)) return BlockOutcome::kDegraded;
  if (store == StoreId::kDisk) reinsert_used();
  Result<Slot> reserved = index_->reserve(store, &block.key);
  const auto make_room = [this] {  // nothing may fail here: the batch is committed
    return on_no_room_ != nullptr && try_catch([this]() -> Result<bool> { return on_no_room_(); }).value_or(false);
  };
  while (!reserved && store == StoreId::kHost && reserved.error().code == Code::kResourceExhausted && make_room()) {
    reserved = index_->reserve(store, &block.key);
  }
  if (reserved) {
    slot = *reserved;
    return BlockOutcome::kTransferred;
  }
  return reserved.error().code == Code::kFailedPrecondition ? BlockOutcome::kPresent : BlockOutcome::kNoRoom;
}

// Segments are evicted oldest first, used or not. So when the last free segment is begun, reinsert the used blocks of
// the next segment to be evicted which are not in host memory, as far as there is space. Unused blocks are evicted, as
// LRU would do.
void OffloadScheduler::reinsert_used() {
  const int64_t room = index_->disk_room();
  // True if a segment was evicted since the last call.
  const bool begun = room > std::exchange(disk_room_, room);
  if (!begun || room >= options_.index.segment_slots || options_.index.disk_segments < kFewSegments) return;
  (void)try_catch([&]() -> Status {
    for (const LeavingBlock& block : index_->leaving()) {
      if (!block.used || block.on_host) continue;
      if (disk_room_ <= 1) break;
      JobBlock& reinsertion = reinsertions_.emplace_back(
          JobBlock{.queued = {.key = block.key, .store = StoreId::kDisk}, .from = block.slot});
      index_->pin(StoreId::kDisk, block.slot);
      const Result<Slot> slot = index_->reinsert(block.slot);
      if (!slot) {
        index_->unpin(StoreId::kDisk, block.slot);
        reinsertions_.pop_back();
        continue;
      }
      reinsertion.queued.slot = *slot;
      --disk_room_;
    }
    return ok();
  });
}

void OffloadScheduler::commit_reinsertions() {
  if (reinsertions_.empty()) return;
  make_room(reinsertions_.size(), 0);
  PlannedBatch& batch = new_batch(Way::kDemote, StoreId::kDisk);
  batch.from = StoreId::kDisk;
  batch.blocks.swap(reinsertions_);  // leaves reinsertions_ empty: a new batch has no blocks
  plan(batch, PlanKind::kMove);
}

// Plan the blocks of batch_ that are copied from the store `from` to the store `to` as one job. `locate` returns where
// a block of batch_ is, by index; none if a job from another store copies it.
template <class Locate>
void OffloadScheduler::commit_moves(Way way, StoreId from, StoreId to, const Locate& locate) {
  PlannedBatch* batch = nullptr;
  size_t block = 0;
  for (const OffloadQueue::Owner& owner : batch_.owners) {
    uint32_t taken = 0;
    for (uint32_t i = 0; i < owner.count; ++i, ++block) {
      const std::optional<BlockLocations> places = locate(block);
      if (!places) continue;
      const QueuedBlock& queued = batch_.blocks[block];
      const Slot source = slot_in(*places, from);
      const bool present = slot_in(*places, to) >= 0;
      BlockOutcome outcome = present ? BlockOutcome::kPresent : BlockOutcome::kEvicted;
      Slot slot = -1;
      if (!present && source >= 0) {
        index_->pin(from, source);
        outcome = reserve(queued, to, slot);
        if (outcome != BlockOutcome::kTransferred) index_->unpin(from, source);
      }
      if (outcome != BlockOutcome::kTransferred) {
        queue_.end(owner.ticket, way, outcome, 1);
        continue;
      }
      if (batch == nullptr) {
        batch = &new_batch(way, to);
        batch->from = from;
      }
      batch->blocks.push_back({.queued = queued, .from = source});
      batch->blocks.back().queued.slot = slot;
      ++taken;
    }
    if (taken > 0) batch->owners.push_back({owner.ticket, taken});
  }
  if (batch != nullptr) plan(*batch, PlanKind::kMove);
}

void OffloadScheduler::commit_moves_from_host(Way way, StoreId to, bool flush) {
  for (OffloadQueue::Next next; (next = queue_.next(way, clock_.now(), flush)).blocks > 0;) {
    make_room(next.blocks, next.containers);
    queue_.commit(way, next, batch_);
    // Look up each block only now: the slot that is reserved for one block may evict another.
    commit_moves(way, StoreId::kHost, to, [this](size_t block) -> std::optional<BlockLocations> {
      BlockLocations places;
      (void)index_->run({&batch_.blocks[block].key, 1}, {&places, 1});
      return places;
    });
  }
}

// Plan the blocks that are copied into host memory as one job for each store that they are read from.
void OffloadScheduler::commit_prefetches(bool flush) {
  for (OffloadQueue::Next next; (next = queue_.next(Way::kPrefetch, clock_.now(), flush)).blocks > 0;) {
    make_room(next.blocks, next.containers);
    keys_.reserve(next.blocks);
    grow(places_, next.blocks);
    queue_.commit(Way::kPrefetch, next, batch_);
    keys_.clear();
    for (const QueuedBlock& queued : batch_.blocks) keys_.push_back(queued.key);
    places_.resize(std::max(places_.size(), keys_.size()));
    index_->find_each(keys_, places_);
    for (const StoreId from : {StoreId::kDisk, StoreId::kRemote}) {
      commit_moves(Way::kPrefetch, from, StoreId::kHost, [&](size_t block) -> std::optional<BlockLocations> {
        const BlockLocations& places = places_[block];
        const bool remote = places.anywhere() && nearest(places) == StoreId::kRemote;
        if (remote != (from == StoreId::kRemote)) return std::nullopt;
        return places;
      });
    }
  }
}

void OffloadScheduler::plan(PlannedBatch& batch, PlanKind kind) {
  const bool move = kind == PlanKind::kMove;
  PlannedJob& job = plan_.add(batch.id, kind, move ? batch.from : batch.store,
                              kind == PlanKind::kGet || kind == PlanKind::kSkip || kind == PlanKind::kFind
                                  ? TransferPriority::kLoad
                                  : TransferPriority::kOffload);
  if (move) job.other = batch.store;
  job.count = static_cast<uint32_t>(batch.blocks.size());
  for (const JobBlock& block : batch.blocks) {
    const QueuedBlock& queued = block.queued;
    plan_.from.push_back(kind == PlanKind::kPut ? queued.block : move ? block.from : queued.slot);
    plan_.to.push_back(job.of_load() ? queued.block : queued.slot);
    if (job.keyed()) plan_.keys.push_back(queued.key);
  }
  for (const OffloadQueue::Owner& owner : batch.owners) queue_.publish_planned(owner.ticket, batch.id, owner.count);
  queue_.job_began(batch.way);
  batch.planned_at = clock_.now();
}

// ---- reports

Status OffloadScheduler::apply(const TransferReport& report) {
  const auto wrong = [&](std::string what) {
    return Error{.code = Code::kInvalidArgument,
                 .what = fmt::format("rank {} reports {}", report.rank, what),
                 .next_step = "this is a mistake in the calling code"};
  };
  if (report.rank < 0 || report.rank >= options_.ranks)
    return try_catch([&]() -> Status { return wrong(fmt::format("where there are {} ranks", options_.ranks)); });
  for (const JobReport& job : report.jobs) {
    const PlannedBatch* const batch = planned(job.id);
    const bool whole = job.count == 0 || (batch != nullptr && job.count == batch->blocks.size() &&
                                          uint64_t{job.first} + job.count <= report.outcomes.size());
    if ((batch == nullptr && job.id >> kBatchBits > planned_) || (batch != nullptr && !whole))
      return try_catch([&]() -> Status { return wrong(fmt::format("job {}, which was planned otherwise", job.id)); });
  }
  const uint64_t bit = uint64_t{1} << report.rank;
  for (const StoreReport& store : report.stores) {
    uint64_t& refusing = refusing_[static_cast<size_t>(store.store)];
    refusing = store.accepting ? refusing & ~bit : refusing | bit;
  }
  index_->hide_remote(!accepting(StoreId::kRemote));
  (void)try_catch([&]() -> Status {
    if (!report.stores.empty()) stores_[static_cast<size_t>(report.rank)] = report.stores;
    return ok();
  });
  for (const JobReport& job : report.jobs) {
    PlannedBatch* const batch = planned(job.id);
    if (batch == nullptr || (batch->reported & bit) != 0) continue;  // reported before
    batch->reported |= bit;
    count(*batch, job, report);
    if (batch->reported == all_ranks_) end(*batch);
  }
  return ok();
}

void OffloadScheduler::count(PlannedBatch& batch, const JobReport& job, const TransferReport& report) {
  if (job.count == 0) return;
  for (size_t i = 0; i < batch.blocks.size(); ++i)
    batch.blocks[i].outcome = worse(batch.blocks[i].outcome, report.outcomes[job.first + i]);
  if (batch.cause && !job.cause.empty()) {
    batch.cause = try_catch([&]() -> Status { return Error{.code = job.code, .what = job.cause}; });
  }
}

void OffloadScheduler::end(PlannedBatch& batch) {
  switch (batch.way) {
    case Way::kOffload: end_offload(batch); break;
    case Way::kDemote:
    case Way::kPublish:
    case Way::kPrefetch: end_move(batch); break;
    case Way::kOnboard: end_onboard(batch); break;
    case Way::kLookup: end_lookup(batch); break;
  }
  end_owners(batch);
  queue_.job_ended(batch.way);
  note_time(times_.batches[static_cast<size_t>(batch.way)], batch.planned_at);
  if (batch.way == Way::kOffload) {  // without memory to queue them the blocks stay in host memory only
    for (const StoreId store : {StoreId::kDisk, StoreId::kRemote})
      (void)try_catch([&]() -> Status { return enqueue_copies_to(store, batch), ok(); });
  }
  free_batches_.push_back(static_cast<uint32_t>(&batch - batches_.data()));
  batch.id = 0;
}

// Record a duration; drop it if there is no memory.
void OffloadScheduler::note_time(std::vector<double>& times, std::chrono::nanoseconds from) noexcept {
  if (times.size() == OffloadTimes::kMost) return;
  (void)try_catch([&]() -> Status { return times.push_back(seconds_between(from, clock_.now())), ok(); });
}

void OffloadScheduler::end_offload(PlannedBatch& batch) {
  bool disk_failed = false;
  blocks_.clear();
  for (JobBlock& block : batch.blocks) {
    const QueuedBlock& queued = block.queued;
    const bool unproven = block.outcome == BlockOutcome::kUnproven;
    if (unproven) {  // a block that a copy may still read stays held
      ++quarantined_;
    } else {
      blocks_.push_back(queued.block);
    }
    const bool good = block.outcome == BlockOutcome::kTransferred;
    const bool same = device_.version(queued.block) == queued.version;
    // Another version: the block was rewritten while it was read.
    if (good && !same) block.outcome = BlockOutcome::kEvicted;
    if (block.outcome != BlockOutcome::kTransferred) {
      disk_failed = disk_failed || (!good && batch.store == StoreId::kDisk);
      index_->abandon(batch.store, queued.slot, unproven);
      continue;
    }
    index_->commit(batch.store, queued.slot);
    if (batch.store == StoreId::kHost && !host_.empty())
      host_[static_cast<size_t>(queued.slot)] = {.parent = queued.parent, .priority = queued.priority};
    if (same) index_->back(queued.block, queued.version, batch.store, queued.slot);
    index_->unpin(batch.store, queued.slot);
    note_stored(queued, batch.store);
  }
  if (disk_failed) index_->close_segment();  // its file may accept no more
  if (options_.mode == OffloadMode::kEager) device_.release(blocks_);
}

void OffloadScheduler::end_move(PlannedBatch& batch) {
  bool failed = false;
  for (const JobBlock& block : batch.blocks) {
    const QueuedBlock& queued = block.queued;
    const bool unproven = block.outcome == BlockOutcome::kUnproven;
    if (block.outcome == BlockOutcome::kDamaged) index_->damaged(batch.from, block.from);
    if (batch.from == StoreId::kDisk && batch.store == StoreId::kDisk &&
        block.outcome == BlockOutcome::kTransferred) {  // commit the new slot before the old one is released
      index_->commit(StoreId::kDisk, queued.slot);
      index_->unpin(StoreId::kDisk, queued.slot);
      index_->unpin(StoreId::kDisk, block.from);
      ++reinserted_;
      continue;
    }
    if (!unproven) index_->unpin(batch.from, block.from);
    if (block.outcome != BlockOutcome::kTransferred) {
      failed = true;
      index_->abandon(batch.store, queued.slot, unproven);
      continue;
    }
    index_->commit(batch.store, queued.slot);
    if (batch.store == StoreId::kHost && !host_.empty())
      host_[static_cast<size_t>(queued.slot)] = {.parent = queued.parent, .priority = queued.priority};
    index_->unpin(batch.store, queued.slot);
    note_stored(queued, batch.store);
  }
  if (failed && batch.store == StoreId::kDisk) index_->close_segment();
}

void OffloadScheduler::end_onboard(PlannedBatch& batch) {
  Request& request = at(batch.request);
  for (const JobBlock& block : batch.blocks) {
    Pinned& pinned = request.pinned[static_cast<size_t>(block.at)];
    if (block.outcome == BlockOutcome::kDamaged) index_->damaged(batch.store, block.queued.slot);
    pinned.good = block.outcome == BlockOutcome::kTransferred;
    if (pinned.good && batch.store == StoreId::kRemote) ++loaded_from_remote_;
    if (block.outcome != BlockOutcome::kUnproven) continue;
    pinned.kept = true;
    ++quarantined_;
  }
}

void OffloadScheduler::end_owners(PlannedBatch& batch) {
  const Status none;
  size_t next = 0;
  for (const OffloadQueue::Owner& owner : batch.owners) {
    OutcomeCounts counts{};
    for (uint32_t i = 0; i < owner.count; ++i) ++counts[static_cast<size_t>(batch.blocks[next++].outcome)];
    for (size_t i = 0; i < counts.size(); ++i) {
      if (counts[i] == 0) continue;
      const auto outcome = static_cast<BlockOutcome>(i);
      const bool good = outcome == BlockOutcome::kTransferred || outcome == BlockOutcome::kEvicted;
      queue_.end(owner.ticket, batch.way, outcome, counts[i], good ? none : batch.cause);
    }
  }
  batch.owners.clear();
}

void OffloadScheduler::enqueue_copies_to(StoreId store, const PlannedBatch& batch) {
  queued_.clear();
  for (const JobBlock& block : batch.blocks) {
    const bool wanted = store == StoreId::kDisk ? block.queued.to_disk : block.queued.to_remote;
    if (!wanted || block.outcome != BlockOutcome::kTransferred) continue;
    queued_.push_back(block.queued);
    queued_.back().store = store;
  }
  enqueue_by_priority(store == StoreId::kDisk ? Way::kDemote : Way::kPublish);
}

// Queue queued_ for `way`. Its blocks are sorted by priority already.
void OffloadScheduler::enqueue_by_priority(Way way) {
  for (size_t first = 0, end = 0; first < queued_.size(); first = end) {
    const int32_t priority = queued_[first].priority;
    while (end < queued_.size() && queued_[end].priority == priority) ++end;
    (void)queue_.enqueue({.way = way, .priority = priority}, std::span(queued_).subspan(first, end - first),
                         end - first, BlockOutcome::kFiltered, clock_.now());
  }
}

}  // namespace torpor
