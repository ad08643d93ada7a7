// SPDX-License-Identifier: Apache-2.0
// BlockIndexCheck: checks all invariants of a BlockIndex and of its parts against each other.
#include <algorithm>

#include <fmt/core.h>

#include "kvcache/block_index.h"

namespace torpor {
namespace {

Error index_broken(std::string what) {
  return {.code = Code::kInternal, .what = fmt::format("index of blocks: {}", what), .next_step = "report this"};
}

}  // namespace

class BlockIndexCheck {
 public:
  explicit BlockIndexCheck(const BlockIndex& index) : index_(index) {}
  Status all() const;

 private:
  using State = StoreSlots::State;
  using Order = StoreSlots::Order;
  Status slots(const StoreSlots& of) const;
  Status lists(const StoreSlots& of) const;
  Status segments() const;
  Status entries() const;

  const BlockIndex& index_;
};

Status BlockIndex::check() const {
  return try_catch([&]() -> Status {
    if (!misuse_.empty()) return index_broken(misuse_);
    return BlockIndexCheck(*this).all();
  });
}

Status BlockIndexCheck::all() const {
  TORPOR_RETURN_IF_ERROR(index_.table_.check());
  for (const StoreSlots& of : index_.stores_.values) {
    TORPOR_RETURN_IF_ERROR(slots(of));
    if (of.store_ != StoreId::kDisk) TORPOR_RETURN_IF_ERROR(lists(of));
  }
  TORPOR_RETURN_IF_ERROR(segments());
  return entries();
}

// Check that the states of the slots match each other, the store's counts and the keys.
Status BlockIndexCheck::slots(const StoreSlots& of) const {
  const StoreId id = of.store_;
  StoreCounts found;
  const int32_t used = id == StoreId::kDisk ? index_.segments_.begun() * index_.options_.segment_slots : of.fresh_;
  for (Slot slot = 0; slot < of.size(); ++slot) {
    const StoreSlots::Record& record = of[slot];
    const auto wrong = [&](std::string_view what) {
      return index_broken(fmt::format("{} slot {}: {}", name(id), slot, what));
    };
    if (slot >= used && record.state != State::kFree) return wrong("in use before its time");
    found.reserved += record.state == State::kReserved ? 1 : 0;
    found.visible += record.state == State::kVisible ? 1 : 0;
    found.doomed += record.state == State::kDoomed ? 1 : 0;
    found.quarantined += record.state == State::kQuarantined ? 1 : 0;
    if (record.state == State::kFree) continue;
    if (record.state == State::kSpent && (id != StoreId::kDisk || record.pins != 0)) return wrong("spent");
    if (record.pins == 0 && record.state != State::kVisible && record.state != State::kSpent) return wrong("no pin");
    const bool has_key = record.state == State::kReserved || record.state == State::kVisible;
    if (record.entry >= 0 && !has_key) return wrong("a key still leads to it");
    if (record.entry < 0 && has_key && id != StoreId::kHost) return wrong("it has no key");
    if (record.entry >= 0) {
      const SlotRef named = index_.table_[record.entry].refs[id];
      const bool replaces = id == StoreId::kDisk && record.before >= 0;
      if (named.slot() != (replaces ? record.before : slot)) return wrong("its key names another one");
      if (!replaces && named.visible() != (record.state == State::kVisible)) return wrong("its key sees it otherwise");
      if (replaces && (record.state != State::kReserved || of[record.before].after != slot))
        return wrong("it replaces a block that does not know of it");
    }
    const bool in_line = id != StoreId::kDisk && record.state == State::kVisible && record.pins == 0;
    if (in_line != (record.order != Order::kNone)) return wrong("it is in line, or not, against its state");
    if (in_line && record.order != of.order_of(slot)) return wrong("it is in line with others than its kind");
  }
  if (found.reserved != of.counts_.reserved || found.visible != of.counts_.visible ||
      found.doomed != of.counts_.doomed || found.quarantined != of.counts_.quarantined)
    return index_broken(fmt::format("the counts of the store {} are wrong", name(id)));
  return ok();
}

// Check that each list has exactly the visible slots of its kind that nobody pins, and the list of free slots all
// others that are free. Not on disk.
Status BlockIndexCheck::lists(const StoreSlots& of) const {
  int64_t unpinned = 0;
  int64_t free = 0;
  for (Slot slot = 0; slot < of.size(); ++slot) {
    unpinned += of[slot].state == State::kVisible && of[slot].pins == 0 ? 1 : 0;
    free += slot < of.fresh_ && of[slot].state == State::kFree ? 1 : 0;
  }
  for (const SlotList& list : of.lists_) {
    int64_t length = 0;
    for (Slot slot = list.first, before = -1; slot >= 0; before = slot, slot = of[slot].after, ++length) {
      if (of[slot].before != before || of[slot].order == Order::kNone || length > list.size)
        return index_broken(fmt::format("the line of the store {} is broken at slot {}", name(of.store_), slot));
    }
    if (length != list.size)
      return index_broken(fmt::format("a line of the store {} has another length", name(of.store_)));
    unpinned -= length;
  }
  for (Slot slot = of.free_; slot >= 0 && free >= 0; slot = of[slot].after, --free) {
    if (of[slot].state != State::kFree) return index_broken(fmt::format("slot {} is not free", slot));
  }
  if (unpinned != 0 || free != 0)
    return index_broken(fmt::format("slots of the store {} are in no line, or in two", name(of.store_)));
  return ok();
}

// Check that what the segments count is what their slots have.
Status BlockIndexCheck::segments() const {
  const StoreSlots& of = index_.stores_[StoreId::kDisk];
  const DiskSegments& segments = index_.segments_;
  for (int32_t number = 0; number < segments.begun(); ++number) {
    const DiskSegments::Segment& segment = segments[number];
    const auto wrong = [&](std::string_view what) { return index_broken(fmt::format("segment {}: {}", number, what)); };
    uint64_t pins = 0;
    for (int32_t at = 0; at < index_.options_.segment_slots; ++at) {
      const StoreSlots::Record& record = of[segments.begin_of(number) + at];
      if ((record.state != State::kFree) != (at < segment.written)) return wrong("not filled in order");
      if (record.state != State::kFree) pins += record.pins;
    }
    if (pins != segment.pins) return wrong("its pins are not those of its slots");
    if (of.useful(segments.begin_of(number), segments.end_of(number)) != segment.useful)
      return wrong("it counts other useful blocks than it has");
  }
  const Status lists = segments.check();
  return lists ? ok() : Status(index_broken(lists.error().what));
}

// Check that each slot that a key names exists and has that key.
Status BlockIndexCheck::entries() const {
  size_t named = 0;
  size_t used = 0;
  for (const StoreSlots& of : index_.stores_.values) {
    for (Slot slot = 0; slot < of.size(); ++slot) {
      const StoreSlots::Record& record = of[slot];
      if (record.state == State::kFree || record.entry < 0) continue;
      const auto& refs = index_.table_[record.entry].refs;
      named += refs[of.store_].slot() == slot ? 1 : 0;
      const auto first = std::find_if(refs.values.begin(), refs.values.end(), [](SlotRef each) { return each.any(); });
      const bool here = first - refs.values.begin() == static_cast<int64_t>(of.store_);
      used += here && first->slot() == slot ? 1 : 0;  // count each key once, at the first of its slots
    }
  }
  const size_t keys = index_.table_.size();
  if (used != keys) return index_broken(fmt::format("{} keys are known, slots have {}", keys, used));
  if (!index_.reports_.consistent()) return index_broken("something is dropped twice, or not at all");
  return named >= used ? ok() : Status(index_broken("a key names a slot that does not know it"));
}

}  // namespace torpor
