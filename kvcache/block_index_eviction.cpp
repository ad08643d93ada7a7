// SPDX-License-Identifier: Apache-2.0
// BlockIndex: hands out slots, evicts blocks for them, and retires namespaces.
#include "kvcache/block_index.h"

namespace torpor {
namespace {

// Return the number of visible blocks of a namespace.
uint64_t blocks_of(const StoreSlots& slots, const KeyTable& table, uint32_t space) {
  uint64_t blocks = 0;
  for (Slot slot = 0; slot < slots.size(); ++slot) {
    const StoreSlots::Record& record = slots[slot];
    const bool visible = record.state == StoreSlots::State::kVisible && record.entry >= 0;
    blocks += visible && table[record.entry].space() == space ? 1 : 0;
  }
  return blocks;
}

}  // namespace

// Return a slot that was free; evict if none is. Return -1 if all are pinned.
Slot BlockIndex::free_slot(StoreId store) {
  if (store == StoreId::kDisk) {
    if (!segments_.has_position()) {
      const int32_t leaving = segments_.next_to_leave();
      if (leaving < 0) return -1;
      evict_segment(leaving);
    }
    return segments_.append();
  }
  StoreSlots& slots = stores_[store];
  if (!slots.has_free()) {
    const Slot leaving = slots.next_to_leave();
    if (leaving < 0) return -1;
    slots.count_evicted(leaving);
    hide(store, leaving, DropReason::kEvicted);
  }
  return slots.take_free();
}

void BlockIndex::evict_segment(int32_t number) {
  StoreSlots& slots = stores_[StoreId::kDisk];
  for (Slot slot = segments_.begin_of(number); slot < segments_.end_of(number); ++slot) {
    if (slots[slot].state == State::kVisible) {
      slots.count_evicted(slot);
      hide(StoreId::kDisk, slot, DropReason::kEvicted);
    }
    slots.empty(slot);
  }
  segments_.empty(number);
  reports_.drop(StoreId::kDisk, number);
}

Status BlockIndex::retire(uint32_t space) {
  if (space >= kMostSpaces || table_.retired(space)) return ok();
  TORPOR_RETURN_IF_ERROR(table_.retire(space));
  for (const StoreId store : {StoreId::kHost, StoreId::kDisk}) {
    if (!reports_.emits(store)) break;
    const uint64_t blocks = blocks_of(stores_[store], table_, space);
    if (blocks > 0) reports_.emit_cleared(store, blocks);  // one event without a key: it may be very many blocks
  }
  stores_[StoreId::kHost].reorder_stale();
  stores_[StoreId::kRemote].reorder_stale();
  for (int32_t number = 0; number < segments_.begun(); ++number) {
    const int32_t useful = stores_[StoreId::kDisk].useful(segments_.begin_of(number), segments_.end_of(number));
    segments_.useful_changed(number, useful - segments_[number].useful);
  }
  return ok();
}

}  // namespace torpor
