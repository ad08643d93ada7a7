// SPDX-License-Identifier: Apache-2.0
#include "kvcache/store_slots.h"

#include <optional>
#include <utility>

namespace torpor {

Result<StoreSlots> StoreSlots::create(StoreId store, int32_t size, const KeyTable& keys, IndexReports& reports) {
  StoreSlots made;
  made.store_ = store;
  made.keys_ = &keys;
  made.reports_ = &reports;
  TORPOR_ASSIGN_OR_RETURN(made.records_, FlatArray<Record>::create(static_cast<size_t>(size)));
  return made;
}

int32_t StoreSlots::useful(Slot begin, Slot end) const {
  int32_t useful = 0;
  for (Slot slot = begin; slot < end; ++slot) useful += records_[slot].state == State::kVisible && !stale(slot) ? 1 : 0;
  return useful;
}

// ---- states of a slot

Slot StoreSlots::take_free() {
  if (free_ < 0) return fresh_++;
  return std::exchange(free_, records_[free_].after);
}

void StoreSlots::reserve(Slot slot, int32_t entry, Slot replaces) {
  Record& record = records_[slot];
  record = {.before = replaces,
            .after = -1,
            .entry = entry,
            .pins = 1,
            .generation = record.generation,
            .state = State::kReserved};
  if (replaces >= 0) records_[replaces].after = slot;
  ++counts_.reserved;
  emit(slot, BlockState::kEmpty, BlockState::kInflight);
}

void StoreSlots::commit(Slot slot) {
  records_[slot].state = State::kVisible;
  --counts_.reserved;
  ++counts_.visible;
  emit(slot, BlockState::kInflight, BlockState::kRegistered);
}

void StoreSlots::abandon(Slot slot, bool unproven) {
  if (!unproven) emit(slot, BlockState::kInflight, BlockState::kEmpty);
  records_[slot].state = unproven ? State::kQuarantined : State::kDoomed;
  --counts_.reserved;
  ++(unproven ? counts_.quarantined : counts_.doomed);
}

void StoreSlots::hide(Slot slot) {
  emit(slot, BlockState::kRegistered, BlockState::kEmpty);
  leave_line(slot);
  Record& record = records_[slot];
  ++record.generation;
  --counts_.visible;
  if (record.pins > 0) {
    record.state = State::kDoomed;
    ++counts_.doomed;
  } else {
    give_back(slot);
  }
}

void StoreSlots::pin(Slot slot) {
  leave_line(slot);
  ++records_[slot].pins;
  records_[slot].used = true;
}

void StoreSlots::unpin(Slot slot) {
  Record& record = records_[slot];
  if (--record.pins > 0) return;
  if (record.state == State::kVisible) return line_up(slot);
  --counts_.doomed;
  give_back(slot);
}

// Free a slot that nothing finds and nobody pins.
void StoreSlots::give_back(Slot slot) {
  Record& record = records_[slot];
  if (store_ == StoreId::kDisk) {
    record.state = State::kSpent;
    return;
  }
  record.state = State::kFree;
  record.after = std::exchange(free_, slot);
  if (store_ == StoreId::kHost) reports_->drop(StoreId::kHost, slot);
}

// Emit a state of a block, if that was asked for: reserved is in flight, visible is registered.
void StoreSlots::emit(Slot slot, BlockState from, BlockState to) const {
  if (!reports_->emits_states(store_)) return;
  const Record& record = records_[slot];
  const std::optional<BlockKey> key = record.entry >= 0 ? std::optional((*keys_)[record.entry].key()) : std::nullopt;
  reports_->emit_state(store_, slot, record.generation, key, from, to);
}

// ---- the slot's key

SlotRef StoreSlots::unlink(Slot slot) {
  Record& record = records_[slot];
  record.entry = -1;
  if (store_ != StoreId::kDisk) return {};
  if (record.before >= 0) {  // it was to replace another slot, which stays
    const Slot stays = std::exchange(record.before, -1);
    records_[stays].after = -1;
    return SlotRef(stays, true);
  }
  if (record.after >= 0) {  // the slot that was to replace it takes its place
    const Slot next = std::exchange(record.after, -1);
    records_[next].before = -1;
    return SlotRef(next, false);
  }
  return {};
}

Slot StoreSlots::replace(Slot by) {
  const Slot old = std::exchange(records_[by].before, -1);
  if (old < 0) return -1;
  records_[old].after = -1;
  records_[old].entry = -1;
  return old;
}

// ---- order of eviction

StoreSlots::Order StoreSlots::order_of(Slot slot) const {
  if (stale(slot)) return Order::kStale;
  if (store_ == StoreId::kRemote) return Order::kClean;
  const StoreId other = store_ == StoreId::kHost ? StoreId::kDisk : StoreId::kHost;
  return (*keys_)[records_[slot].entry].refs[other].visible() ? Order::kClean : Order::kDirty;
}

void StoreSlots::count_evicted(Slot slot) {
  const Order order = order_of(slot);
  ++(order == Order::kStale   ? counts_.evicted_stale
     : order == Order::kClean ? counts_.evicted_clean
                              : counts_.evicted_dirty);
}

// Prefetches the next slots in the order of eviction: they were used longest ago, so they are not in the processor's
// cache. An eviction reads three places one after the other; this begins to load them one, two and three evictions
// ahead.
Slot StoreSlots::next_to_leave() const {
  Slot oldest = -1;
  for (const SlotList& list : lists_) {
    oldest = list.first;
    if (oldest >= 0) break;
  }
  if (oldest < 0) return -1;
  const Slot first = records_[oldest].after;
  if (first < 0) return oldest;
  if (const int32_t entry = records_[first].entry; entry >= 0)
    keys_->prefetch_cells(KeyTable::hash_of((*keys_)[entry].key()));
  const Slot second = records_[first].after;
  if (second < 0) return oldest;
  if (const int32_t entry = records_[second].entry; entry >= 0) __builtin_prefetch(&(*keys_)[entry]);
  if (const Slot third = records_[second].after; third >= 0) __builtin_prefetch(&records_[third]);
  return oldest;
}

// Append a visible slot without a pin to the list of its kind: it is evicted last of them.
void StoreSlots::line_up(Slot slot) {
  if (store_ == StoreId::kDisk) return;
  const Order order = order_of(slot);
  records_[slot].order = order;
  lists_[static_cast<size_t>(order)].push_back(records_, slot);
}

void StoreSlots::leave_line(Slot slot) {
  const Order order = std::exchange(records_[slot].order, Order::kNone);
  if (order != Order::kNone) lists_[static_cast<size_t>(order)].remove(records_, slot);
}

void StoreSlots::reorder(Slot slot) {
  if (slot < 0 || records_[slot].order == Order::kNone || records_[slot].order == order_of(slot)) return;
  leave_line(slot);
  line_up(slot);
}

void StoreSlots::reorder_stale() {
  for (const Order order : {Order::kClean, Order::kDirty}) {
    Slot next = -1;
    for (Slot slot = lists_[static_cast<size_t>(order)].first; slot >= 0; slot = next) {
      next = records_[slot].after;
      if (stale(slot)) reorder(slot);
    }
  }
}

}  // namespace torpor
