// SPDX-License-Identifier: Apache-2.0
// BlockIndex: hands out disk slots, evicts segments, and reinserts blocks.
#include "kvcache/block_index.h"

namespace torpor {

Slot BlockIndex::next_position() {
  if (!segments_.has_position()) {
    const int32_t leaving = segments_.next_to_leave();
    if (leaving < 0) return -1;
    evict_segment(leaving);
  }
  return segments_.append();
}

void BlockIndex::evict_segment(int32_t number) {
  Store& of = store_of(StoreId::kDisk);
  for (Slot slot = segments_.begin_of(number); slot < segments_.end_of(number); ++slot) {
    SlotRecord& record = of.slots[slot];
    if (record.state == State::kVisible) {
      const bool was_stale = stale(record);
      const bool on_host = !was_stale && ref(record.entry, StoreId::kHost).visible();
      ++(was_stale ? of.counts.evicted_stale : on_host ? of.counts.evicted_clean : of.counts.evicted_dirty);
      hide(StoreId::kDisk, slot, DropReason::kEvicted);
    }
    record.state = State::kFree;
  }
  segments_.empty(number);
  reports_.drop(StoreId::kDisk, number);
}

// Count the useful blocks of each segment again, after a namespace was retired.
void BlockIndex::recount_segments() {
  const Store& of = store_of(StoreId::kDisk);
  for (int32_t number = 0; number < segments_.begun(); ++number) {
    int useful = 0;
    for (Slot slot = segments_.begin_of(number); slot < segments_.end_of(number); ++slot)
      useful += of.slots[slot].state == State::kVisible && !stale(of.slots[slot]) ? 1 : 0;
    segments_.useful_changed(number, useful - segments_[number].useful);
  }
}

std::vector<LeavingBlock> BlockIndex::leaving() const {
  std::vector<LeavingBlock> blocks;
  const int32_t number = segments_.next_to_leave();
  if (number < 0) return blocks;
  const Status collected = try_catch([&] {
    for (Slot slot = segments_.begin_of(number); slot < segments_.end_of(number); ++slot) {
      const SlotRecord& record = store_of(StoreId::kDisk).slots[slot];
      if (record.state != State::kVisible || stale(record)) continue;
      const KeyTable::Entry& entry = table_[record.entry];
      blocks.push_back({.slot = slot, .key = entry.key(), .used = record.used, .on_host = entry.refs[0].visible()});
    }
    return ok();
  });
  return collected ? std::move(blocks) : std::vector<LeavingBlock>();
}

Result<Slot> BlockIndex::append_again(Slot old) {
  SlotRecord* record = known(StoreId::kDisk, old);
  if (record == nullptr || record->state != State::kVisible || record->pins == 0 || record->after >= 0 ||
      stale(*record)) {
    return try_catch([&]() -> Result<Slot> {
      return Error{.code = Code::kFailedPrecondition,
                   .what = "only a visible, pinned block on disk can be appended again, and once",
                   .next_step = "leave it out"};
    });
  }
  const Slot slot = next_position();
  if (slot < 0) {
    return try_catch([&]() -> Result<Slot> {
      return Error{.code = Code::kResourceExhausted,
                   .what = "every segment on disk is in use",
                   .next_step = "do it before the last free one is full"};
    });
  }
  start(StoreId::kDisk, slot, record->entry);
  record->after = slot;
  store_of(StoreId::kDisk).slots[slot].before = old;
  return slot;
}

}  // namespace torpor
