// What who operates an engine asks of its OffloadScheduler. Takes memory of its own; it is rare.
#include <algorithm>

#include <fmt/core.h>

#include "kvcache/offload_scheduler.h"

namespace torpor {

Result<CancelledCandidate> OffloadScheduler::cancel(uint64_t candidate) {
  if (candidate >> 48 == static_cast<uint64_t>(Way::kUp)) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = fmt::format("candidate {} is a load: a request waits for its blocks", candidate),
                 .next_step = "abort the request"};
  }
  if (const uint64_t blocks = queue_.cancel(candidate); blocks > 0) return CancelledCandidate{.blocks = blocks};
  for (const PlannedBatch& batch : batches_) {
    const bool there = std::any_of(batch.owners.begin(), batch.owners.end(), [&](const OffloadQueue::Owner& owner) {
      return owner.ticket != nullptr && owner.ticket->number == candidate;
    });
    if (batch.id != 0 && there) return CancelledCandidate{.committed = true};
  }
  return Error{.code = Code::kNotFound,
               .what = fmt::format("there is no candidate {}", candidate),
               .next_step = "look at `snapshot`: it may have ended"};
}

DroppedKeys OffloadScheduler::drop(std::span<const BlockKey> keys, StoreId store) {
  DroppedKeys all;
  std::vector<Places> places(keys.size());
  index_->find_each(keys, places);
  for (const Places& each : places) {
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
  std::vector<Places> places(keys.size());
  index_->find_each(keys, places);
  std::vector<QueuedBlock> queued;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (places[i].host >= 0 && places[i].disk < 0) queued.push_back({.key = keys[i], .store = StoreId::kDisk});
  }
  if (queued.empty()) return MovedKeys{};
  const TransferHandle handle =
      queue_.enqueue({.way = Way::kOn}, queued, queued.size(), BlockOutcome::kFiltered, clock_.now());
  return MovedKeys{.candidate = handle.number(), .blocks = queued.size()};
}

}  // namespace torpor
