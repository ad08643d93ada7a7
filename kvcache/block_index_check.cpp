// SPDX-License-Identifier: Apache-2.0
// BlockIndex: checks all invariants against each other.
#include <algorithm>

#include <fmt/core.h>

#include "kvcache/block_index.h"

namespace torpor {
namespace {

Error index_broken(std::string what) {
  return {.code = Code::kInternal, .what = fmt::format("index of blocks: {}", what), .next_step = "report this"};
}

}  // namespace

Status BlockIndex::check() const {
  return try_catch([&]() -> Status {
    if (!misuse_.empty()) return index_broken(misuse_);
    TORPOR_RETURN_IF_ERROR(table_.check());
    for (const StoreId store : {StoreId::kHost, StoreId::kDisk, StoreId::kRemote})
      TORPOR_RETURN_IF_ERROR(check_slots(store));
    TORPOR_RETURN_IF_ERROR(check_segments());
    return check_entries();
  });
}

// Check that the states of the slots match the store's counts, and that each list has exactly the visible slots of its
// kind that nobody pins.
Status BlockIndex::check_slots(StoreId id) const {
  const Store& store = store_of(id);
  StoreCounts found;
  int64_t unpinned = 0;
  int64_t free = 0;
  const int32_t used = id == StoreId::kDisk ? segments_.begun() * options_.segment_slots : store.fresh;
  for (Slot slot = 0; slot < store.size; ++slot) {
    const SlotRecord& record = store.slots[slot];
    const auto wrong = [&](std::string_view what) {
      return index_broken(fmt::format("{} slot {}: {}", name(id), slot, what));
    };
    if (slot >= used && record.state != State::kFree) return wrong("in use before its time");
    found.reserved += record.state == State::kReserved ? 1 : 0;
    found.visible += record.state == State::kVisible ? 1 : 0;
    found.doomed += record.state == State::kDoomed ? 1 : 0;
    found.quarantined += record.state == State::kQuarantined ? 1 : 0;
    free += slot < used && record.state == State::kFree ? 1 : 0;
    if (record.state == State::kFree) continue;
    if (record.state == State::kSpent && (id != StoreId::kDisk || record.pins != 0)) return wrong("spent");
    if (record.pins == 0 && record.state != State::kVisible && record.state != State::kSpent) return wrong("no pin");
    const bool has_key = record.state == State::kReserved || record.state == State::kVisible;
    if (record.entry >= 0 && !has_key) return wrong("a key still leads to it");
    if (record.entry < 0 && has_key && id != StoreId::kHost) return wrong("it has no key");
    if (record.entry >= 0) {
      const SlotRef named = table_[record.entry].refs[static_cast<size_t>(id)];
      const bool replaces = id == StoreId::kDisk && record.before >= 0;
      if (named.slot() != (replaces ? record.before : slot)) return wrong("its key names another one");
      if (!replaces && named.visible() != (record.state == State::kVisible)) return wrong("its key sees it otherwise");
      if (replaces && (record.state != State::kReserved || store.slots[record.before].after != slot))
        return wrong("it replaces a block that does not know of it");
    }
    const bool in_line = id != StoreId::kDisk && record.state == State::kVisible && record.pins == 0;
    if (in_line != (record.order != Order::kNone)) return wrong("it is in line, or not, against its state");
    if (in_line && record.order != order_of(id, record)) return wrong("it is in line with others than its kind");
    unpinned += in_line ? 1 : 0;
  }
  if (found.reserved != store.counts.reserved || found.visible != store.counts.visible ||
      found.doomed != store.counts.doomed || found.quarantined != store.counts.quarantined)
    return index_broken(fmt::format("the counts of the store {} are wrong", name(id)));
  if (id == StoreId::kDisk) return ok();
  for (const SlotList& list : store.lists) {
    int64_t length = 0;
    for (Slot slot = list.first, before = -1; slot >= 0; before = slot, slot = store.slots[slot].after, ++length) {
      if (store.slots[slot].before != before || store.slots[slot].order == Order::kNone || length > list.size)
        return index_broken(fmt::format("the line of the store {} is broken at slot {}", name(id), slot));
    }
    if (length != list.size) return index_broken(fmt::format("a line of the store {} has another length", name(id)));
    unpinned -= length;
  }
  for (Slot slot = store.free; slot >= 0 && free >= 0; slot = store.slots[slot].after, --free) {
    if (store.slots[slot].state != State::kFree) return index_broken(fmt::format("slot {} is not free", slot));
  }
  if (unpinned != 0 || free != 0)
    return index_broken(fmt::format("slots of the store {} are in no line, or in two", name(id)));
  return ok();
}

// Check that what the segments count is what their slots have.
Status BlockIndex::check_segments() const {
  for (int32_t number = 0; number < segments_.begun(); ++number) {
    const DiskSegments::Segment& segment = segments_[number];
    const auto wrong = [&](std::string_view what) { return index_broken(fmt::format("segment {}: {}", number, what)); };
    uint64_t pins = 0;
    int32_t useful = 0;
    for (int32_t at = 0; at < options_.segment_slots; ++at) {
      const SlotRecord& record = store_of(StoreId::kDisk).slots[segments_.begin_of(number) + at];
      if ((record.state != State::kFree) != (at < segment.written)) return wrong("not filled in order");
      if (record.state == State::kFree) continue;
      pins += record.pins;
      useful += record.state == State::kVisible && !stale(record) ? 1 : 0;
    }
    if (pins != segment.pins) return wrong("its pins are not those of its slots");
    if (useful != segment.useful) return wrong("it counts other useful blocks than it has");
  }
  const Status lists = segments_.check();
  return lists ? ok() : Status(index_broken(lists.error().what));
}

// Check that each slot that a key names exists and has that key.
Status BlockIndex::check_entries() const {
  size_t named = 0;
  size_t used = 0;
  for (const StoreId id : {StoreId::kHost, StoreId::kDisk, StoreId::kRemote}) {
    const Store& store = store_of(id);
    for (Slot slot = 0; slot < store.size; ++slot) {
      const SlotRecord& record = store.slots[slot];
      if (record.state == State::kFree || record.entry < 0) continue;
      named += table_[record.entry].refs[static_cast<size_t>(id)].slot() == slot ? 1 : 0;
      const auto& refs = table_[record.entry].refs;  // count each key once, at the first of its slots
      const auto first = std::find_if(refs.begin(), refs.end(), [](const SlotRef& each) { return each.any(); });
      used += first - refs.begin() == static_cast<int64_t>(id) && first->slot() == slot ? 1 : 0;
    }
  }
  if (used != table_.size()) return index_broken(fmt::format("{} keys are known, slots have {}", table_.size(), used));
  if (!reports_.consistent()) return index_broken("something is dropped twice, or not at all");
  return named >= used ? ok() : Status(index_broken("a key names a slot that does not know it"));
}

}  // namespace torpor
