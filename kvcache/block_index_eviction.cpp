// SPDX-License-Identifier: Apache-2.0
// BlockIndex: evicts blocks: stale ones first, then clean ones, then dirty ones, each kind in order of use. Drops
// slots.
#include <algorithm>

#include "kvcache/block_index.h"

namespace torpor {

Slot BlockIndex::free_slot(StoreId store) {
  Store& of = store_of(store);
  if (of.free < 0 && of.fresh == of.size) {
    for (const Order order : {Order::kStale, Order::kClean, Order::kDirty}) {
      const Slot oldest = of.lists[static_cast<size_t>(order)].first;
      if (oldest < 0) continue;
      ++(order == Order::kStale   ? of.counts.evicted_stale
         : order == Order::kClean ? of.counts.evicted_clean
                                  : of.counts.evicted_dirty);
      prefetch_those_behind(store, oldest);
      hide(store, oldest, DropReason::kEvicted);
      break;
    }
  }
  if (of.free >= 0) {
    const Slot slot = of.free;
    of.free = of.slots[slot].after;
    return slot;
  }
  return of.fresh < of.size ? of.fresh++ : -1;
}

// Prefetch the next slots in the order of eviction: they were used longest ago, so they are not in the processor's
// cache. An eviction reads three places one after the other; this begins to load them one, two and three evictions
// ahead.
void BlockIndex::prefetch_those_behind(StoreId store, Slot slot) const {
  const Store& of = store_of(store);
  const Slot first = of.slots[slot].after;
  if (first < 0) return;
  if (const int32_t entry = of.slots[first].entry; entry >= 0)
    table_.prefetch_cells(KeyTable::hash_of(table_[entry].key()));
  const Slot second = of.slots[first].after;
  if (second < 0) return;
  if (const int32_t entry = of.slots[second].entry; entry >= 0) __builtin_prefetch(&table_[entry]);
  if (const Slot third = of.slots[second].after; third >= 0) __builtin_prefetch(&of.slots[third]);
}

// Free a slot that nothing finds and nobody pins.
void BlockIndex::return_slot(StoreId store, Slot slot) {
  Store& of = store_of(store);
  SlotRecord& record = of.slots[slot];
  if (store == StoreId::kDisk) {
    record.state = State::kSpent;
    return;
  }
  record.state = State::kFree;
  record.after = of.free;
  of.free = slot;
  if (store == StoreId::kHost) reports_.drop(StoreId::kHost, slot);
}

// Make a visible slot unfindable, by its key and as a backing.
void BlockIndex::hide(StoreId store, Slot slot, DropReason reason) {
  Store& of = store_of(store);
  SlotRecord& record = of.slots[slot];
  if (reports_.emits(store) && !stale(record)) reports_.emit_dropped(store, slot, table_[record.entry].key(), reason);
  emit_state(store, slot, BlockState::kRegistered, BlockState::kEmpty);
  leave_line(store, slot);
  if (store == StoreId::kDisk && !stale(record)) segments_.useful_changed(segment_of(slot), -1);
  if (reports_.remembers_removals() && record.entry >= 0) reports_.remove(store, table_[record.entry].key());
  unlink(store, slot);
  ++record.generation;
  --of.counts.visible;
  if (record.pins > 0) {
    record.state = State::kDoomed;
    ++of.counts.doomed;
  } else {
    return_slot(store, slot);
  }
}

// Emit a state of a block, if that was asked for: reserved is in flight, visible is registered.
void BlockIndex::emit_state(StoreId store, Slot slot, BlockState from, BlockState to) const {
  if (!reports_.emits_states(store)) return;
  const SlotRecord& record = store_of(store).slots[slot];
  const std::optional<BlockKey> key = record.entry >= 0 ? std::optional(table_[record.entry].key()) : std::nullopt;
  reports_.emit_state(store, slot, record.generation, key, from, to);
}

// Emit one event without a key for each store: it may be very many blocks.
void BlockIndex::emit_cleared(uint32_t space) const {
  for (const StoreId store : {StoreId::kHost, StoreId::kDisk}) {
    if (!reports_.emits(store)) return;
    const Store& of = store_of(store);
    uint64_t blocks = 0;
    for (Slot slot = 0; slot < of.size; ++slot) {
      const SlotRecord& record = of.slots[slot];
      blocks += record.state == State::kVisible && record.entry >= 0 && table_[record.entry].space() == space ? 1 : 0;
    }
    if (blocks > 0) reports_.emit_cleared(store, blocks);
  }
}

// Remove the slot from its key's entry; erase an entry that names no slot.
void BlockIndex::unlink(StoreId store, Slot slot) {
  SlotRecord& record = store_of(store).slots[slot];
  const int32_t entry = record.entry;
  if (entry < 0) return;
  record.entry = -1;
  if (store == StoreId::kDisk && record.before >= 0) {  // it was to replace another slot, which stays
    store_of(store).slots[record.before].after = -1;
    record.before = -1;
    return;
  }
  if (store == StoreId::kDisk && record.after >= 0) {  // the slot that was to replace it takes its place
    SlotRecord& next = store_of(store).slots[record.after];
    ref(entry, store) = SlotRef(record.after, false);
    next.before = -1;
    record.after = -1;
  } else {
    ref(entry, store) = SlotRef();
  }
  if (store == StoreId::kDisk) host_reordered(entry);
  if (table_[entry].empty()) table_.erase(entry);
}

// ---- order of eviction

BlockIndex::Order BlockIndex::order_of(StoreId store, const SlotRecord& record) const {
  if (stale(record)) return Order::kStale;
  const bool elsewhere = store == StoreId::kRemote || table_[record.entry].refs[1].visible();
  return elsewhere ? Order::kClean : Order::kDirty;
}

// Append a visible slot without a pin to the list of its kind: it is evicted last of them.
void BlockIndex::line_up(StoreId store, Slot slot) {
  if (store == StoreId::kDisk) return;
  Store& of = store_of(store);
  SlotRecord& record = of.slots[slot];
  record.order = order_of(store, record);
  of.lists[static_cast<size_t>(record.order)].push_back(of.slots, slot);
}

void BlockIndex::leave_line(StoreId store, Slot slot) {
  Store& of = store_of(store);
  SlotRecord& record = of.slots[slot];
  if (record.order == Order::kNone) return;
  of.lists[static_cast<size_t>(record.order)].remove(of.slots, slot);
  record.order = Order::kNone;
}

// Move the block's host slot to the end of the other kind's list, because the block came to disk or left it.
void BlockIndex::host_reordered(int32_t entry) {
  const Slot slot = ref(entry, StoreId::kHost).visible_slot();
  if (slot < 0) return;
  SlotRecord& record = store_of(StoreId::kHost).slots[slot];
  if (record.order == Order::kNone || record.order == order_of(StoreId::kHost, record)) return;
  leave_line(StoreId::kHost, slot);
  line_up(StoreId::kHost, slot);
}

Status BlockIndex::retire(uint32_t space) {
  if (space >= kMostSpaces || retired(space)) return ok();
  TORPOR_RETURN_IF_ERROR(try_catch([&] {
    if (retired_.size() <= space) retired_.resize(space + 1);
    return ok();
  }));
  emit_cleared(space);
  retired_[space] = 1;
  for (const StoreId store : {StoreId::kHost, StoreId::kRemote}) {
    for (const Order order : {Order::kClean, Order::kDirty}) {  // keeps their order
      Slot next = -1;
      for (Slot slot = store_of(store).lists[static_cast<size_t>(order)].first; slot >= 0; slot = next) {
        next = store_of(store).slots[slot].after;
        if (!stale(store_of(store).slots[slot])) continue;
        leave_line(store, slot);
        line_up(store, slot);
      }
    }
  }
  recount_segments();
  return ok();
}

}  // namespace torpor
