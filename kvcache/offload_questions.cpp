// SPDX-License-Identifier: Apache-2.0
// OffloadScheduler: asks the remote store, through the ranks, which keys it has, and remembers the answers.
#include "kvcache/offload_scheduler.h"

namespace torpor {
namespace {

constexpr size_t kMostAsked = 4096;  // keys for one request: 65,536 tokens in blocks of 16

}  // namespace

size_t OffloadScheduler::ask(uint32_t number, std::span<const BlockKey> keys) {
  if (options_.index.remote_slots == 0 || !accepting(StoreId::kRemote)) return 0;
  places_.resize(std::max(places_.size(), keys.size()));
  index_->find_each(keys, places_);
  Question question{.request = number};
  for (size_t i = 0; i < keys.size() && question.keys.size() < kMostAsked; ++i) {
    if (!places_[i].anywhere()) question.keys.push_back(keys[i]);
  }
  const size_t size = question.keys.size();
  if (size == 0) return 0;
  const int64_t waiting = queue_.jobs_under_way(Way::kLookup) + static_cast<int64_t>(asks_.size());
  if (waiting >= options_.queue.loading_batches) {
    queue_.count(Way::kLookup, BlockOutcome::kQueueFull, size);
    return 0;
  }
  question.number = ++questions_;
  asks_.push_back(std::move(question));
  at(number).asked = questions_;
  return size;
}

void OffloadScheduler::commit_asks() {
  while (!asks_.empty()) {
    const Question& question = asks_.back();
    make_room(question.keys.size(), 0);
    PlannedBatch& batch = new_batch(Way::kLookup, StoreId::kRemote);
    batch.request = question.request;
    batch.question = question.number;
    for (const BlockKey& key : question.keys)
      batch.blocks.push_back({.queued = {.key = key, .block = 0, .slot = 0, .store = StoreId::kRemote}});
    plan(batch, PlanKind::kFind);
    asks_.pop_back();
  }
}

// Make the keys that every rank found visible in the index.
void OffloadScheduler::end_ask(PlannedBatch& batch) {
  for (const JobBlock& block : batch.blocks) {
    queue_.count(Way::kLookup, block.outcome, 1);
    if (block.outcome != BlockOutcome::kTransferred || block.queued.key.space != space_) continue;
    const Result<Slot> slot = index_->reserve(StoreId::kRemote, &block.queued.key);
    if (!slot) continue;  // another request asked for it, or all slots are pinned
    index_->commit(StoreId::kRemote, *slot);
    index_->unpin(StoreId::kRemote, *slot);
  }
  if (uint64_t& asked = at(batch.request).asked; asked == batch.question) asked = 0;
}

}  // namespace torpor
