// SPDX-License-Identifier: Apache-2.0
// BlockIndex: reinserts blocks of the segment that is evicted next.
#include "kvcache/block_index.h"

namespace torpor {

std::vector<LeavingBlock> BlockIndex::leaving() const {
  std::vector<LeavingBlock> blocks;
  const int32_t number = segments_.next_to_leave();
  if (number < 0) return blocks;
  const Status collected = try_catch([&] {
    const StoreSlots& slots = stores_[StoreId::kDisk];
    for (Slot slot = segments_.begin_of(number); slot < segments_.end_of(number); ++slot) {
      const StoreSlots::Record& record = slots[slot];
      if (record.state != State::kVisible || slots.stale(slot)) continue;
      const KeyTable::Entry& entry = table_[record.entry];
      blocks.push_back(
          {.slot = slot, .key = entry.key(), .used = record.used, .on_host = entry.refs[StoreId::kHost].visible()});
    }
    return ok();
  });
  return collected ? std::move(blocks) : std::vector<LeavingBlock>();
}

Result<Slot> BlockIndex::reinsert(Slot old) {
  const StoreSlots& slots = stores_[StoreId::kDisk];
  const StoreSlots::Record* record = slots.known(old);
  if (record == nullptr || record->state != State::kVisible || record->pins == 0 || record->after >= 0 ||
      slots.stale(old)) {
    return try_catch([&]() -> Result<Slot> {
      return Error{.code = Code::kFailedPrecondition,
                   .what = "only a visible, pinned block on disk can be reinserted, and once",
                   .next_step = "leave it out"};
    });
  }
  const Slot slot = free_slot(StoreId::kDisk);
  if (slot < 0) {
    return try_catch([&]() -> Result<Slot> {
      return Error{.code = Code::kResourceExhausted,
                   .what = "every segment on disk is in use",
                   .next_step = "do it before the last free one is full"};
    });
  }
  start(StoreId::kDisk, slot, record->entry, old);
  return slot;
}

}  // namespace torpor
