// SPDX-License-Identifier: Apache-2.0
// BlockPool: makes a snapshot, and restores one into an unused pool.
#include <algorithm>

#include <fmt/core.h>

#include "kvcache/block_pool.h"

namespace torpor {

BlockPoolSnapshot BlockPool::snapshot() const {
  const MutexLock lock(mutex_);
  BlockPoolSnapshot snapshot{.registered = {}, .free_order = free_order_locked()};
  std::vector<std::pair<uint64_t, int32_t>> by_age;
  for (int32_t id = 0; id < options_.num_blocks; ++id) {
    if (slot(id).state == BlockState::kRegistered && !slot(id).discarded) by_age.emplace_back(slot(id).age, id);
  }
  std::sort(by_age.begin(), by_age.end());
  for (const auto& [age, id] : by_age) snapshot.registered.push_back({id, slot(id).identity, age});
  return snapshot;
}

Result<BlockPool::Handles> BlockPool::restore(const BlockPoolSnapshot& snapshot) {
  return try_catch([&] { return restore_now(snapshot); });
}

Result<BlockPool::Handles> BlockPool::restore_now(const BlockPoolSnapshot& snapshot) {
  const auto wrong = [](std::string what) {
    return Error{.code = Code::kCorruption, .what = std::move(what), .next_step = "use another checkpoint"};
  };
  const auto count = static_cast<size_t>(options_.num_blocks);
  std::vector<bool> registered(count), free(count);
  for (const BlockPoolSnapshot::Block& block : snapshot.registered) {
    if (block.id < 0 || block.id >= options_.num_blocks)
      return wrong(fmt::format("block {} of {}", block.id, options_.num_blocks));
    if (registered[static_cast<size_t>(block.id)]) return wrong(fmt::format("block {} is registered twice", block.id));
    if (block.identity.tokens.size() != static_cast<size_t>(options_.block_tokens))
      return wrong(fmt::format("block {} has {} tokens", block.id, block.identity.tokens.size()));
    registered[static_cast<size_t>(block.id)] = true;
  }
  bool cached_seen = false;
  for (const int32_t id : snapshot.free_order) {
    if (id < 0 || id >= options_.num_blocks)
      return wrong(fmt::format("block {} of {} is free", id, options_.num_blocks));
    if (free[static_cast<size_t>(id)]) return wrong(fmt::format("block {} is free twice", id));
    free[static_cast<size_t>(id)] = true;
    if (cached_seen && !registered[static_cast<size_t>(id)])
      return wrong(fmt::format("block {} is empty and free behind cached ones", id));
    cached_seen = registered[static_cast<size_t>(id)];
  }
  // Make everything that can fail first, with handles that have no pool yet: a failure has changed nothing.
  BlockPool aside(options_, EventPort());
  Handles handles;
  {
    const MutexLock lock(aside.mutex_);
    aside.fill(snapshot);
  }
  for (int32_t id = 0; id < options_.num_blocks; ++id) {
    if (free[static_cast<size_t>(id)]) continue;
    if (registered[static_cast<size_t>(id)]) {
      handles.shared.emplace(id, BlockRef());
    } else {
      handles.owned.emplace(id, MutableBlock());
    }
  }
  const MutexLock lock(mutex_);
  if (!index_.empty() || empty_.size() != slots_.size()) {
    return Error{.code = Code::kFailedPrecondition,
                 .what = "the block pool is in use",
                 .next_step = "restore into a new engine"};
  }
  // From here on nothing fails.
  const MutexLock other(aside.mutex_);
  for (int32_t id = 0; id < options_.num_blocks; ++id) aside.slot(id).generation = slot(id).generation;
  std::swap(slots_, aside.slots_);
  std::swap(empty_, aside.empty_);
  std::swap(cached_, aside.cached_);
  std::swap(index_, aside.index_);
  free_blocks_ = aside.free_blocks_;
  registrations_ = aside.registrations_;
  owned_ = aside.owned_;
  registered_ = aside.registered_;
  shared_ = aside.shared_;
  for (const BlockPoolSnapshot::Block& block : snapshot.registered) publish_registered(block.id);
  for (auto& [id, block] : handles.shared) {
    block.pool_ = this;
    block.id_ = id;
  }
  for (auto& [id, block] : handles.owned) {
    block.pool_ = this;
    block.id_ = id;
  }
  return handles;
}

// Fill this unused pool from a checked snapshot. Blocks that are not free get their handles later.
void BlockPool::fill(const BlockPoolSnapshot& snapshot) {
  empty_.clear();
  free_blocks_ = 0;
  owned_ = options_.num_blocks;
  for (Slot& slot : slots_) {
    slot.is_free = false;
    slot.owned = true;
  }
  for (const BlockPoolSnapshot::Block& block : snapshot.registered) {
    slot(block.id).identity = block.identity;
    slot(block.id).state = BlockState::kRegistered;
    make_registered(block.id);
  }
  for (auto id = snapshot.free_order.rbegin(); id != snapshot.free_order.rend(); ++id) {
    if (slot(*id).state == BlockState::kRegistered) continue;
    slot(*id).owned = false;
    --owned_;
    add_to_free(*id);  // the block that is added last is taken first
  }
  for (const int32_t id : snapshot.free_order) {
    if (slot(id).state == BlockState::kRegistered) drop_reference(id);
  }
}

}  // namespace torpor
