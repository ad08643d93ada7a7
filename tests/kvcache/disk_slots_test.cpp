// SPDX-License-Identifier: Apache-2.0
#include "kvcache/disk_slots.h"

#include "tests/support/results.h"

namespace torpor {
namespace {

std::vector<StoreSlot> firsts(const std::vector<SlotRange>& ranges) {
  std::vector<StoreSlot> slots;
  for (const SlotRange& range : ranges) {
    EXPECT_EQ(range.count, 4);
    slots.push_back(range.first);
  }
  return slots;
}

std::vector<StoreSlot> gone_after(DiskSlots& slots, int32_t segment) {
  std::vector<int64_t> gone;
  gone.reserve(slots.most_gone(1));
  const size_t room = gone.capacity();
  slots.release_segment(segment, gone);
  EXPECT_LE(gone.size(), room);
  std::vector<SlotRange> ranges;
  slots.add_ranges(gone, ranges);
  return firsts(ranges);
}

TEST(DiskSlotsTest, ASegmentIsOneOfTheStoreUntilItIsLetGoOf) {
  DiskSlots slots(3, 4, 40);
  EXPECT_EQ(slots.slot_to_read(5), -1);
  EXPECT_EQ(slots.slot_to_write(5), 41);  // segment 10, position 1
  EXPECT_EQ(slots.slot_to_write(7), 43);
  EXPECT_EQ(slots.slot_to_write(0), 44);
  EXPECT_EQ(slots.slot_to_read(5), 41);
  EXPECT_EQ(gone_after(slots, 1), std::vector<StoreSlot>{40});
  EXPECT_EQ(slots.slot_to_read(5), -1);
  EXPECT_EQ(slots.slot_to_write(5), 49);  // never again the same
  EXPECT_EQ(gone_after(slots, 2), std::vector<StoreSlot>{});
}

TEST(DiskSlotsTest, WhatWasRecoveredGoesWithTheLastSlotThatHasIt) {
  DiskSlots slots(3, 4, 40);
  const RecoveredSlot recovered[] = {{.slot = 1}, {.slot = 2}, {.slot = 9}, {.slot = 13}};
  slots.note_recovered(recovered);
  slots.adopt(0, 1);
  slots.adopt(4, 2);
  slots.adopt(1, 13);
  EXPECT_EQ(firsts(slots.take_unadopted()), std::vector<StoreSlot>{8});
  EXPECT_EQ(slots.slot_to_read(4), 2);
  EXPECT_EQ(gone_after(slots, 0), std::vector<StoreSlot>{12});  // slot 4 has another one of segment 0
  EXPECT_EQ(slots.slot_to_write(5), 41);
  EXPECT_EQ(gone_after(slots, 1), (std::vector<StoreSlot>{0, 40}));
}

}  // namespace
}  // namespace torpor
