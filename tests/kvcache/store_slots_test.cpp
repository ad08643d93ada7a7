// SPDX-License-Identifier: Apache-2.0
// The states of a slot, and the order of eviction, without an index around them.
#include "kvcache/store_slots.h"

#include "tests/support/results.h"

namespace torpor {
namespace {

using test::value_of;
using State = StoreSlots::State;

constexpr int32_t kSlots = 3;

// The slots of one store, with a key for each.
class StoreSlotsTest : public ::testing::TestWithParam<StoreId> {
 protected:
  Slot take() {
    const Slot slot = GetParam() == StoreId::kDisk ? next_++ : slots_.take_free();
    BlockKey key;
    key.hash[0] = static_cast<uint8_t>(slot);
    const int32_t entry = keys_.insert(key, KeyTable::hash_of(key));
    keys_[entry].refs[GetParam()] = SlotRef(slot, false);
    slots_.reserve(slot, entry);
    return slot;
  }
  Slot visible() {
    const Slot slot = take();
    slots_.commit(slot);
    return slot;
  }
  State state(Slot slot) const { return slots_[slot].state; }

  KeyTable keys_ = value_of(KeyTable::create(kSlots));
  IndexReports reports_ = IndexReports({}, 16, kSlots, 0, 0);
  StoreSlots slots_ = value_of(StoreSlots::create(GetParam(), kSlots, keys_, reports_));
  Slot next_ = 0;
};

INSTANTIATE_TEST_SUITE_P(, StoreSlotsTest, ::testing::Values(StoreId::kHost, StoreId::kDisk, StoreId::kRemote),
                         [](const auto& store) { return std::string(name(store.param)); });

TEST_P(StoreSlotsTest, ADroppedSlotIsDoomedUntilItsLastPin) {
  const Slot slot = visible();
  const uint32_t generation = slots_[slot].generation;
  slots_.pin(slot);
  slots_.hide(slot);
  EXPECT_EQ(state(slot), State::kDoomed);
  EXPECT_EQ(slots_[slot].generation, generation + 1);
  slots_.unpin(slot);
  EXPECT_EQ(state(slot), State::kDoomed);
  slots_.unpin(slot);
  EXPECT_EQ(state(slot), GetParam() == StoreId::kDisk ? State::kSpent : State::kFree);
  EXPECT_EQ(slots_.counts().doomed, 0);
  EXPECT_EQ(reports_.take_dropped().size(), GetParam() == StoreId::kHost ? 1u : 0u);  // the ranks forget host slots
}

TEST_P(StoreSlotsTest, AQuarantinedSlotIsNeverFree) {
  const Slot slot = take();
  slots_.abandon(slot, true);
  EXPECT_EQ(state(slot), State::kQuarantined);
  EXPECT_EQ(slots_.counts().quarantined, 1);
  EXPECT_EQ(slots_.counts().reserved, 0);
  if (GetParam() == StoreId::kDisk) return;
  visible();
  visible();
  EXPECT_FALSE(slots_.has_free());
  EXPECT_EQ(slots_.next_to_leave(), -1);  // the others have the pins of their reservations
}

TEST_P(StoreSlotsTest, BlocksOfARetiredNamespaceLeaveFirst) {
  if (GetParam() == StoreId::kDisk) return;  // whole segments leave
  for (int32_t each = 0; each < kSlots; ++each) slots_.unpin(visible());
  slots_.pin(0);
  slots_.unpin(0);
  EXPECT_EQ(slots_.next_to_leave(), 1);  // used longest ago
  EXPECT_EQ(slots_.useful(0, kSlots), kSlots);
  ASSERT_TRUE(keys_.retire(0));
  slots_.reorder_stale();
  EXPECT_EQ(slots_.useful(0, kSlots), 0);
  EXPECT_EQ(slots_.next_to_leave(), 1);  // in the order that they had
  slots_.count_evicted(1);
  EXPECT_EQ(slots_.counts().evicted_stale, 1u);
}

TEST_P(StoreSlotsTest, ABlockThatComesToDiskIsClean) {
  if (GetParam() != StoreId::kHost) return;
  const Slot first = visible();
  const Slot second = visible();
  slots_.unpin(first);
  slots_.unpin(second);
  EXPECT_EQ(slots_.next_to_leave(), first);
  keys_[slots_[second].entry].refs[StoreId::kDisk] = SlotRef(0, true);
  slots_.reorder(second);
  EXPECT_EQ(slots_.next_to_leave(), second);
}

TEST_P(StoreSlotsTest, TheKeyOfAnAbandonedReplacementNamesTheOldSlot) {
  if (GetParam() != StoreId::kDisk) return;
  const Slot old = visible();
  const int32_t entry = slots_[old].entry;
  slots_.reserve(1, entry, old);
  EXPECT_EQ(slots_[old].after, 1);
  slots_.abandon(1, false);
  const SlotRef named = slots_.unlink(1);
  EXPECT_TRUE(named.visible());
  EXPECT_EQ(named.slot(), old);
  EXPECT_EQ(slots_[old].after, -1);

  slots_.reserve(2, entry, old);
  slots_.commit(2);
  EXPECT_EQ(slots_.replace(2), old);
  EXPECT_EQ(slots_[old].entry, -1);
  EXPECT_EQ(slots_.replace(2), -1);
}

TEST_P(StoreSlotsTest, TheReservedReplacementTakesTheKeyOfADroppedSlot) {
  if (GetParam() != StoreId::kDisk) return;
  const Slot old = visible();
  slots_.reserve(1, slots_[old].entry, old);
  slots_.hide(old);
  const SlotRef named = slots_.unlink(old);
  EXPECT_TRUE(named.any());
  EXPECT_FALSE(named.visible());
  EXPECT_EQ(named.slot(), 1);
  EXPECT_EQ(slots_.replace(1), -1);
}

}  // namespace
}  // namespace torpor
