// SPDX-License-Identifier: Apache-2.0
// OffloadScheduler: the calls of an operator, which are rare and allocate memory of their own; and its block events.
#include <algorithm>

#include <fmt/core.h>

#include "kvcache/offload_scheduler.h"

namespace torpor {

bool OffloadScheduler::is_committed(uint64_t candidate) const {
  return std::any_of(batches_.begin(), batches_.end(), [&](const PlannedBatch& batch) {
    return batch.id != 0 && std::any_of(batch.owners.begin(), batch.owners.end(), [&](const auto& owner) {
             return owner.ticket != nullptr && owner.ticket->number == candidate;
           });
  });
}

Result<CancelledCandidate> OffloadScheduler::cancel(uint64_t candidate) {
  const bool committed = is_committed(candidate);
  // A request waits for a load on every rank: the ranks have to say that it has ended.
  const bool load = candidate >> 48 == static_cast<uint64_t>(Way::kOnboard);
  const uint64_t blocks = load ? queue_.skip(candidate) : queue_.cancel(candidate);
  if (blocks > 0) return CancelledCandidate{.blocks = blocks};
  if (committed) return CancelledCandidate{.committed = true};
  return Error{.code = Code::kNotFound,
               .what = fmt::format("there is no candidate {}", candidate),
               .next_step = "look at `snapshot`: it may have ended"};
}

DroppedKeys OffloadScheduler::drop(std::span<const BlockKey> keys, StoreId store) {
  DroppedKeys all;
  std::vector<BlockLocations> places(keys.size());
  index_->find_each(keys, places);
  for (const BlockLocations& each : places) {
    const Slot slot = store == StoreId::kHost ? each.host : each.disk;
    if (slot < 0) {
      ++all.absent;
    } else if (index_->drop(store, slot)) {
      ++all.dropped;
    } else {
      ++all.pinned;
    }
  }
  return all;
}

Result<MovedKeys> OffloadScheduler::move_on(std::span<const BlockKey> keys) {
  if (options_.index.disk_segments == 0) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = "there is no disk below host memory",
                 .next_step = "give the engine a disk tier"};
  }
  std::vector<BlockLocations> places(keys.size());
  index_->find_each(keys, places);
  std::vector<QueuedBlock> queued;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (places[i].host < 0 || places[i].disk >= 0) continue;
    const HostBlock& stored = host_[static_cast<size_t>(places[i].host)];
    queued.push_back({.key = keys[i], .parent = stored.parent, .priority = stored.priority, .store = StoreId::kDisk});
  }
  if (queued.empty()) return MovedKeys{};
  // One candidate, which can be cancelled. It has the highest priority of its blocks.
  const auto by_priority = [](const QueuedBlock& a, const QueuedBlock& b) { return a.priority < b.priority; };
  const int32_t priority = std::max_element(queued.begin(), queued.end(), by_priority)->priority;
  const TransferHandle handle = queue_.enqueue({.way = Way::kDemote, .priority = priority}, queued, queued.size(),
                                               BlockOutcome::kFiltered, clock_.now());
  return MovedKeys{.candidate = handle.number(), .blocks = queued.size()};
}

// ---- the calls of Residency

std::vector<TransferHandle> OffloadScheduler::enqueue_in_batches(const OffloadQueue::Enqueue& how,
                                                                 std::span<const QueuedBlock> blocks) {
  std::vector<TransferHandle> handles;
  const auto most = static_cast<size_t>(options_.queue.max_batch_size);
  for (size_t first = 0; first < blocks.size(); first += most) {
    const std::span<const QueuedBlock> part = blocks.subspan(first, std::min(most, blocks.size() - first));
    handles.push_back(queue_.enqueue(how, part, part.size(), BlockOutcome::kFiltered, clock_.now()));
  }
  return handles;
}

std::vector<TransferHandle> OffloadScheduler::bring(std::span<const BlockKey> keys, StoreId store) {
  std::vector<BlockLocations> places(keys.size());
  index_->find_each(keys, places);
  std::vector<QueuedBlock> queued;
  for (size_t i = 0; i < keys.size(); ++i) {
    const BlockLocations& at = places[i];
    const bool there = (store == StoreId::kHost ? at.host : store == StoreId::kDisk ? at.disk : at.remote) >= 0;
    const bool within_reach = store == StoreId::kHost ? at.anywhere() : at.host >= 0;
    if (there || !within_reach) continue;
    QueuedBlock block{.key = keys[i], .store = store};
    if (store != StoreId::kHost && !host_.empty()) {
      const HostBlock& stored = host_[static_cast<size_t>(at.host)];
      block.parent = stored.parent;
      block.priority = stored.priority;
    }
    queued.push_back(block);
  }
  const Way way = store == StoreId::kHost ? Way::kPrefetch : store == StoreId::kDisk ? Way::kDemote : Way::kPublish;
  return enqueue_in_batches({.way = way}, queued);
}

std::vector<TransferHandle> OffloadScheduler::copy_down(std::span<const BlockKey> keys, std::span<const int32_t> blocks,
                                                        uint64_t after_step) {
  const StoreId store = options_.index.host_slots > 0 ? StoreId::kHost : StoreId::kDisk;
  std::vector<QueuedBlock> queued;
  for (size_t i = 0; i < std::min(keys.size(), blocks.size()); ++i) {
    const ContentVersion version = device_.version(blocks[i]);
    if (version == ContentVersion::kNone) continue;
    queued.push_back({.key = keys[i], .version = version, .block = blocks[i], .store = store});
  }
  return enqueue_in_batches({.way = Way::kOffload, .after_step = after_step}, queued);
}

// ---- events

void OffloadScheduler::publish(const BlockEvent& event) noexcept {
  const Status published = try_catch([&]() -> Status {
    if (events_.events.size() < options_.events) return events_.events.push_back(event), ok();
    return ++events_.lost, ok();
  });
  if (!published) ++events_.lost;
}

void OffloadScheduler::note_removed() {
  if (!index_->reports().any_removed()) return;
  const RemovedBlocks removed = index_->reports().take_removed();
  events_.lost += removed.lost;
  for (const RemovedBlock& block : removed.blocks) {
    if (block.key.space != space_ || block.store == StoreId::kRemote) continue;  // older namespaces ended with reset()
    publish({.stored = false, .store = block.store, .key = block.key, .tokens = options_.block_tokens});
  }
}

void OffloadScheduler::note_stored(const QueuedBlock& block, StoreId store) {
  if (options_.events == 0 || block.key.space != space_ || store == StoreId::kRemote)
    return;        // a remote store is not this engine's alone
  note_removed();  // keeps the order of events
  publish({.store = store, .key = block.key, .parent = block.parent, .tokens = options_.block_tokens});
}

}  // namespace torpor
