// SPDX-License-Identifier: Apache-2.0
// OffloadScheduler: lookups, through the ranks, of keys in the remote store.
#include "kvcache/offload_scheduler.h"

namespace torpor {
namespace {

constexpr size_t kMostLookupKeys = 4096;  // keys for one request: 65,536 tokens in blocks of 16

}  // namespace

size_t OffloadScheduler::begin_lookup(uint32_t number, std::span<const BlockKey> keys) {
  if (options_.index.remote_slots == 0 || !accepting(StoreId::kRemote)) return 0;
  places_.resize(std::max(places_.size(), keys.size()));
  index_->find_each(keys, places_);
  Lookup lookup{.request = number};
  for (size_t i = 0; i < keys.size() && lookup.keys.size() < kMostLookupKeys; ++i) {
    if (!places_[i].anywhere()) lookup.keys.push_back(keys[i]);
  }
  const size_t size = lookup.keys.size();
  if (size == 0) return 0;
  const int64_t waiting = queue_.jobs_under_way(Way::kLookup) + static_cast<int64_t>(lookups_.size());
  if (waiting >= options_.queue.loading_batches) {
    queue_.count(Way::kLookup, BlockOutcome::kQueueFull, size);
    return 0;
  }
  lookup.number = ++lookups_begun_;
  lookups_.push_back(std::move(lookup));
  at(number).lookup = lookups_begun_;
  return size;
}

void OffloadScheduler::commit_lookups() {
  while (!lookups_.empty()) {
    const Lookup& lookup = lookups_.back();
    make_room(lookup.keys.size(), 0);
    PlannedBatch& batch = new_batch(Way::kLookup, StoreId::kRemote);
    batch.request = lookup.request;
    batch.lookup = lookup.number;
    for (const BlockKey& key : lookup.keys)
      batch.blocks.push_back({.queued = {.key = key, .block = 0, .slot = 0, .store = StoreId::kRemote}});
    plan(batch, PlanKind::kFind);
    lookups_.pop_back();
  }
}

// Make the keys that every rank found visible in the index.
void OffloadScheduler::end_lookup(PlannedBatch& batch) {
  for (const JobBlock& block : batch.blocks) {
    queue_.count(Way::kLookup, block.outcome, 1);
    if (block.outcome != BlockOutcome::kTransferred || block.queued.key.space != space_) continue;
    const Result<Slot> slot = index_->reserve(StoreId::kRemote, &block.queued.key);
    if (!slot) continue;  // another lookup found it, or all slots are pinned
    index_->commit(StoreId::kRemote, *slot);
    index_->unpin(StoreId::kRemote, *slot);
  }
  if (uint64_t& pending = at(batch.request).lookup; pending == batch.lookup) pending = 0;
}

}  // namespace torpor
