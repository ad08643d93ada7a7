// SPDX-License-Identifier: Apache-2.0
// BlockIndex: hands out disk slots, and chooses the segment that is evicted.
#include "kvcache/block_index.h"

namespace torpor {

Slot BlockIndex::next_position() {
  if (open_ >= 0 && segments_[open_].written == options_.segment_slots) close_segment();
  if (open_ < 0) {
    if (fresh_segments_ < options_.disk_segments) {
      open_ = fresh_segments_++;
    } else {
      const int32_t leaving = next_to_leave();
      if (leaving < 0) return -1;
      evict_segment(leaving);
      open_ = leaving;
    }
  }
  return open_ * options_.segment_slots + segments_[open_].written++;
}

void BlockIndex::close_segment() {
  if (open_ < 0) return;
  Segment& segment = segments_[open_];
  segment.closed = true;
  segment.stale = segment.useful == 0;
  (segment.stale ? stale_segments_ : closed_).push_back(segments_, open_);
  open_ = -1;
}

int64_t BlockIndex::disk_room() const {
  const int64_t here = open_ < 0 ? 0 : options_.segment_slots - segments_[open_].written;
  return here + int64_t{options_.disk_segments - fresh_segments_} * options_.segment_slots;
}

// Return the segment that is evicted next; -1 if every segment has a pin. A pinned segment is passed over and keeps its
// age.
int32_t BlockIndex::next_to_leave() const {
  for (const SlotList* list : {&stale_segments_, &closed_}) {
    for (int32_t segment = list->first; segment >= 0; segment = segments_[segment].after) {
      if (segments_[segment].pins == 0) return segment;
    }
  }
  return -1;
}

void BlockIndex::evict_segment(int32_t number) {
  Store& of = store_of(StoreId::kDisk);
  const int32_t written = segments_[number].written;
  for (Slot slot = number * options_.segment_slots, end = slot + written; slot < end; ++slot) {
    SlotRecord& record = of.slots[slot];
    if (record.state == State::kVisible) {
      const bool was_stale = stale(record);
      const bool on_host = !was_stale && ref(record.entry, StoreId::kHost).visible();
      ++(was_stale ? of.counts.evicted_stale : on_host ? of.counts.evicted_clean : of.counts.evicted_dirty);
      hide(StoreId::kDisk, slot, DropReason::kEvicted);
    }
    record.state = State::kFree;
  }
  (segments_[number].stale ? stale_segments_ : closed_).remove(segments_, number);
  segments_[number] = {};
  const auto bit = static_cast<size_t>(number + options_.host_slots);
  if ((in_dropped_[bit / 64] >> (bit % 64) & 1) == 0) dropped_.push_back({StoreId::kDisk, number});
  in_dropped_[bit / 64] |= uint64_t{1} << (bit % 64);
}

void BlockIndex::useful_changed(int32_t number, int by) {
  Segment& segment = segments_[number];
  segment.useful += by;
  if (!segment.closed || segment.stale == (segment.useful == 0)) return;
  (segment.stale ? stale_segments_ : closed_).remove(segments_, number);
  segment.stale = !segment.stale;
  (segment.stale ? stale_segments_ : closed_).push_back(segments_, number);
}

// Count the useful blocks of each segment again, after a namespace was retired.
void BlockIndex::recount_segments() {
  const Store& of = store_of(StoreId::kDisk);
  for (int32_t number = 0; number < fresh_segments_; ++number) {
    const Slot begin = number * options_.segment_slots;
    int useful = 0;
    for (Slot slot = begin; slot < begin + segments_[number].written; ++slot)
      useful += of.slots[slot].state == State::kVisible && !stale(of.slots[slot]) ? 1 : 0;
    useful_changed(number, useful - segments_[number].useful);
  }
}

std::vector<LeavingBlock> BlockIndex::leaving() const {
  std::vector<LeavingBlock> blocks;
  const int32_t number = next_to_leave();
  if (number < 0) return blocks;
  const Slot begin = number * options_.segment_slots;
  const Status collected = try_catch([&] {
    for (Slot slot = begin; slot < begin + segments_[number].written; ++slot) {
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
