// SPDX-License-Identifier: Apache-2.0
#include "kvcache/disk_slots.h"

#include <algorithm>
#include <utility>

namespace torpor {

DiskSlots::DiskSlots(int32_t segments, int32_t segment_slots, StoreSlot first)
    : segment_slots_(std::max(segment_slots, 1)),
      slots_(static_cast<size_t>(segments) * static_cast<size_t>(std::max(segment_slots, 0)), -1),
      segments_(static_cast<size_t>(segments), kNoSegment),
      next_segment_(first / segment_slots_) {}

StoreSlot DiskSlots::slot_to_write(Slot slot) {
  int64_t& segment = segments_[static_cast<size_t>(slot / segment_slots_)];
  if (segment == kNoSegment) segment = next_segment_++;
  return slots_[static_cast<size_t>(slot)] = segment * segment_slots_ + slot % segment_slots_;
}

void DiskSlots::note_recovered(std::span<const RecoveredSlot> recovered) {
  for (const RecoveredSlot& each : recovered) adopted_.emplace(each.slot / segment_slots_, 0);
}

void DiskSlots::adopt(Slot slot, StoreSlot recovered) {
  slots_[static_cast<size_t>(slot)] = recovered;
  ++adopted_[recovered / segment_slots_];
}

std::vector<SlotRange> DiskSlots::take_unadopted() {
  std::vector<SlotRange> ranges;
  for (const auto& [segment, slots] : adopted_) {
    if (slots == 0) ranges.push_back(range_of(segment));
  }
  std::erase_if(adopted_, [](const auto& each) { return each.second == 0; });
  return ranges;
}

void DiskSlots::release_segment(int32_t number, std::vector<int64_t>& gone) {
  if (const int64_t live = std::exchange(segments_[static_cast<size_t>(number)], kNoSegment); live != kNoSegment)
    gone.push_back(live);
  const int32_t first = number * segment_slots_;
  for (int32_t slot = first; slot < first + segment_slots_; ++slot) {
    const StoreSlot left = std::exchange(slots_[static_cast<size_t>(slot)], -1);
    const auto adopted = left < 0 ? adopted_.end() : adopted_.find(left / segment_slots_);
    if (adopted == adopted_.end() || --adopted->second > 0) continue;
    gone.push_back(adopted->first);
    adopted_.erase(adopted);
  }
}

void DiskSlots::add_ranges(std::vector<int64_t>& gone, std::vector<SlotRange>& ranges) const {
  std::sort(gone.begin(), gone.end());
  gone.erase(std::unique(gone.begin(), gone.end()), gone.end());
  for (const int64_t segment : gone) ranges.push_back(range_of(segment));
}

}  // namespace torpor
