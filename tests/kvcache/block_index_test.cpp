// SPDX-License-Identifier: Apache-2.0
// The rules of the index, one by one. What goes first, what is visible, what stays pinned.
#include "kvcache/block_index.h"

#include <algorithm>

#include "tests/support/results.h"

namespace torpor {
namespace {

using test::value_of;

BlockKey key(uint8_t id, uint32_t space = 0, uint32_t group = 0) {
  BlockKey key{.group = group, .space = space};
  key.hash[31] = id;
  return key;
}

// Checks the index after every test; misuse is looked at by those that misuse it.
class BlockIndexTest : public ::testing::Test {
 protected:
  void make(BlockIndexOptions options) { index_ = value_of(BlockIndex::create(options)); }
  void SetUp() override {
    make({.host_slots = 4, .disk_segments = 3, .segment_slots = 2, .remote_slots = 3, .device_blocks = 8});
  }
  void TearDown() override { EXPECT_SUCCEEDS(index_->check()); }

  Slot reserved(StoreId store, const BlockKey& key) { return value_of(index_->reserve(store, &key)); }
  Slot pinned(StoreId store, const BlockKey& key) {
    const Slot slot = reserved(store, key);
    index_->commit(store, slot);
    return slot;
  }
  Slot stored(StoreId store, const BlockKey& key) {
    const Slot slot = pinned(store, key);
    index_->unpin(store, slot);
    return slot;
  }
  void use(StoreId store, Slot slot) {
    index_->pin(store, slot);
    index_->unpin(store, slot);
  }
  BlockLocations places(const BlockKey& key) const {
    BlockLocations found;
    index_->run({&key, 1}, {&found, 1});
    return found;
  }
  std::unique_ptr<BlockIndex> index_;
};

constexpr StoreId kHost = StoreId::kHost;
constexpr StoreId kDisk = StoreId::kDisk;
constexpr StoreId kRemote = StoreId::kRemote;

TEST_F(BlockIndexTest, ARunEndsAtTheFirstBlockThatIsNowhere) {
  const std::vector<BlockKey> chain = {key(1), key(2), key(3), key(4)};
  const Slot host = stored(kHost, key(1));
  const Slot disk = stored(kDisk, key(2));
  const Slot remote = stored(kRemote, key(2));
  stored(kHost, key(4));
  std::vector<BlockLocations> found(4);
  ASSERT_EQ(index_->run(chain, found), 2u);
  EXPECT_EQ(found[0], (BlockLocations{.host = host}));
  EXPECT_EQ(found[1], (BlockLocations{.disk = disk, .remote = remote}));
  EXPECT_EQ(index_->run({}, found), 0u);
  EXPECT_EQ(index_->run(chain, std::span(found).first(1)), 1u);
}

TEST_F(BlockIndexTest, LongRunsAreFoundWhole) {
  make({.host_slots = 250});
  std::vector<BlockKey> chain;
  for (uint8_t i = 0; i < 250; ++i) chain.push_back(key(i));
  for (const BlockKey& each : chain) stored(kHost, each);
  std::vector<BlockLocations> found(250);
  ASSERT_EQ(index_->run(chain, found), 250u);
  for (Slot slot = 0; slot < 250; ++slot) EXPECT_EQ(found[static_cast<size_t>(slot)].host, slot);
}

TEST_F(BlockIndexTest, S2OnlyWhatWasCommittedIsVisible) {
  const Slot slot = reserved(kHost, key(1));
  EXPECT_FALSE(places(key(1)).anywhere());
  index_->commit(kHost, slot);
  EXPECT_EQ(places(key(1)).host, slot);
}

TEST_F(BlockIndexTest, GroupsAndSpacesTellEqualHashesApart) {
  const Slot slot = stored(kHost, key(1, 0, 1));
  EXPECT_FALSE(places(key(1)).anywhere());
  EXPECT_FALSE(places(key(1, 1, 1)).anywhere());
  EXPECT_EQ(places(key(1, 0, 1)).host, slot);
  const BlockKey large = key(1, 0, kMostGroups);
  EXPECT_FAILS(index_->reserve(kHost, &large), Code::kInvalidArgument, "group 256");
  EXPECT_FALSE(places(large).anywhere());
}

TEST_F(BlockIndexTest, AKeyThatIsThereOrOnItsWayIsNotTakenAgain) {
  const Slot slot = reserved(kHost, key(1));
  const BlockKey again = key(1);
  EXPECT_FAILS(index_->reserve(kHost, &again), Code::kFailedPrecondition, "on its way");
  index_->commit(kHost, slot);
  EXPECT_FAILS(index_->reserve(kHost, &again), Code::kFailedPrecondition, "it is there");
  stored(kDisk, key(1));  // another store is another place
  EXPECT_EQ(index_->keys(), 1u);
}

TEST_F(BlockIndexTest, AnAbandonedSlotIsFreeAndItsKeyMayComeAgain) {
  index_->abandon(kHost, reserved(kHost, key(1)), false);
  EXPECT_FALSE(places(key(1)).anywhere());
  EXPECT_EQ(index_->keys(), 0u);
  stored(kHost, key(1));
  EXPECT_TRUE(places(key(1)).anywhere());
}

TEST_F(BlockIndexTest, S3AnUnprovenSlotIsNeverUsedAgain) {
  make({.host_slots = 2, .disk_segments = 2, .segment_slots = 1});
  const Slot lost = reserved(kHost, key(1));
  index_->abandon(kHost, lost, true);
  for (uint8_t id = 2; id < 9; ++id) EXPECT_NE(stored(kHost, key(id)), lost);
  EXPECT_EQ(index_->counts(kHost).quarantined, 1);
  const Slot on_disk = reserved(kDisk, key(1));
  index_->abandon(kDisk, on_disk, true);
  for (uint8_t id = 2; id < 9; ++id) EXPECT_NE(index_->segment_of(stored(kDisk, key(id))), index_->segment_of(on_disk));
}

TEST_F(BlockIndexTest, OfHostMemoryTheLeastRecentlyUsedGoesFirst) {
  std::vector<Slot> slots;
  for (uint8_t id = 0; id < 4; ++id) slots.push_back(stored(kHost, key(id)));
  use(kHost, slots[0]);
  stored(kHost, key(4));
  EXPECT_TRUE(places(key(0)).anywhere());
  EXPECT_FALSE(places(key(1)).anywhere());
  EXPECT_EQ(index_->counts(kHost).evicted_dirty, 1u);
}

TEST_F(BlockIndexTest, CleanBlocksGoBeforeDirtyOnesAndStaleOnesBeforeBoth) {
  for (uint8_t id = 0; id < 3; ++id) stored(kHost, key(id));
  stored(kDisk, key(2));
  stored(kHost, key(3, 7));
  ASSERT_SUCCEEDS(index_->retire(7));
  stored(kHost, key(4));
  EXPECT_EQ(index_->counts(kHost).evicted_stale, 1u);
  stored(kHost, key(5));
  EXPECT_EQ(index_->counts(kHost).evicted_clean, 1u);
  EXPECT_EQ(places(key(2)).host, -1);
  EXPECT_GE(places(key(2)).disk, 0);
  stored(kHost, key(6));
  EXPECT_EQ(index_->counts(kHost).evicted_dirty, 1u);
  EXPECT_FALSE(places(key(0)).anywhere());
}

TEST_F(BlockIndexTest, ABlockWhoseSegmentWentIsDirtyAgain) {
  for (uint8_t id = 0; id < 4; ++id) stored(kHost, key(id));
  stored(kDisk, key(3));
  for (uint8_t id = 10; id < 16; ++id) stored(kDisk, key(id));  // three segments, and one that took the first's place
  EXPECT_EQ(places(key(3)).disk, -1);
  EXPECT_EQ(index_->counts(kDisk).evicted_clean, 1u);
  stored(kHost, key(20));
  EXPECT_EQ(index_->counts(kHost).evicted_dirty, 1u);
  EXPECT_TRUE(places(key(3)).anywhere());
}

TEST_F(BlockIndexTest, WhatIsPinnedStaysAndWhereAllIsPinnedThereIsNoRoom) {
  std::vector<Slot> slots;
  for (uint8_t id = 0; id < 4; ++id) slots.push_back(pinned(kHost, key(id)));
  const BlockKey more = key(9);
  EXPECT_FAILS(index_->reserve(kHost, &more), Code::kResourceExhausted, "host");
  EXPECT_EQ(index_->keys(), 4u);
  index_->unpin(kHost, slots[2]);
  EXPECT_EQ(reserved(kHost, more), slots[2]);
}

TEST_F(BlockIndexTest, PinsAreCounted) {
  const Slot slot = pinned(kHost, key(1));
  index_->pin(kHost, slot);
  index_->unpin(kHost, slot);
  for (uint8_t id = 2; id < 9; ++id) stored(kHost, key(id));
  EXPECT_EQ(places(key(1)).host, slot);
  index_->unpin(kHost, slot);
  for (uint8_t id = 9; id < 13; ++id) stored(kHost, key(id));
  EXPECT_FALSE(places(key(1)).anywhere());
}

TEST_F(BlockIndexTest, ADamagedBlockIsAMissAtOnceAndItsSlotFreeWhenNobodyReadsIt) {
  make({.host_slots = 1, .disk_segments = 2, .segment_slots = 1, .device_blocks = 1});
  const Slot slot = pinned(kHost, key(1));
  index_->back(0, ContentVersion{5}, kHost, slot);
  index_->damaged(kHost, slot);
  index_->damaged(kHost, slot);  // two loads found it
  EXPECT_FALSE(places(key(1)).anywhere());
  EXPECT_FALSE(index_->backing(0, ContentVersion{5}).anywhere());
  const BlockKey next = key(2);
  EXPECT_FAILS(index_->reserve(kHost, &next), Code::kResourceExhausted);
  index_->unpin(kHost, slot);
  EXPECT_EQ(stored(kHost, next), slot);
  const Slot on_disk = stored(kDisk, key(1));
  index_->damaged(kDisk, on_disk);
  EXPECT_EQ(places(key(1)).disk, -1);
  EXPECT_NE(stored(kDisk, key(1)), on_disk);  // S5: no byte on disk is overwritten
}

TEST_F(BlockIndexTest, S1ABlockIsBackedByItsStampAndNotByItsKey) {
  const Slot slot = stored(kHost, key(1));
  index_->back(3, ContentVersion{7}, kHost, slot);
  EXPECT_EQ(index_->backing(3, ContentVersion{7}), (BlockLocations{.host = slot}));
  EXPECT_FALSE(index_->backing(3, ContentVersion{8}).anywhere());  // the same key, computed again
  EXPECT_FALSE(index_->backing(2, ContentVersion{7}).anywhere());
  const Slot disk = stored(kDisk, key(1));
  stored(kRemote, key(1));
  index_->back(3, ContentVersion{7}, kDisk, disk);
  EXPECT_EQ(index_->backing(3, ContentVersion{7}), (BlockLocations{.host = slot, .disk = disk}));
  index_->back(3, ContentVersion{8}, kDisk, disk);  // new content, that lies on disk only
  EXPECT_EQ(index_->backing(3, ContentVersion{8}), (BlockLocations{.disk = disk}));
  EXPECT_FALSE(index_->backing(3, ContentVersion{7}).anywhere());
}

TEST_F(BlockIndexTest, ABackingEndsWhenItsSlotIsAnothers) {
  make({.host_slots = 1, .device_blocks = 1});
  const Slot slot = stored(kHost, key(1));
  index_->back(0, ContentVersion{1}, kHost, slot);
  EXPECT_EQ(stored(kHost, key(2)), slot);
  EXPECT_FALSE(index_->backing(0, ContentVersion{1}).anywhere());
  stored(kHost, key(1));  // an equal key in the same slot: perhaps of another computation
  EXPECT_FALSE(index_->backing(0, ContentVersion{1}).anywhere());
}

TEST_F(BlockIndexTest, APrivateSlotIsFoundByItsBackingOnlyAndGoesFirst) {
  const Slot slot = value_of(index_->reserve(kHost, nullptr));
  index_->commit(kHost, slot);
  index_->back(1, ContentVersion{4}, kHost, slot);
  EXPECT_EQ(index_->keys(), 0u);
  EXPECT_EQ(index_->backing(1, ContentVersion{4}).host, slot);
  for (uint8_t id = 0; id < 3; ++id) stored(kHost, key(id));
  index_->unpin(kHost, slot);  // used last of all
  EXPECT_EQ(stored(kHost, key(9)), slot);
  EXPECT_FAILS(index_->reserve(kDisk, nullptr), Code::kInvalidArgument, "checkpoint's own file");
}

TEST_F(BlockIndexTest, S7ARetiredSpaceIsNeitherFoundNorTaken) {
  const Slot slot = pinned(kHost, key(1, 3));
  const Slot late = reserved(kHost, key(2, 3));
  index_->back(0, ContentVersion{1}, kHost, slot);
  stored(kRemote, key(1, 3));
  ASSERT_SUCCEEDS(index_->retire(3));
  index_->commit(kHost, late);
  for (const uint8_t id : {1, 2}) EXPECT_FALSE(places(key(id, 3)).anywhere());
  EXPECT_EQ(index_->backing(0, ContentVersion{1}).host, slot);  // a live block keeps its version
  const BlockKey again = key(5, 3);
  EXPECT_FAILS(index_->reserve(kDisk, &again), Code::kFailedPrecondition, "retired");
  const Slot other = stored(kHost, key(1, 4));
  EXPECT_EQ(places(key(1, 4)).host, other);
  index_->unpin(kHost, slot);
  index_->unpin(kHost, late);
  stored(kHost, key(6));
  EXPECT_EQ(stored(kHost, key(7)), slot);  // before all others, in their order
}

TEST_F(BlockIndexTest, DiskIsFilledInOrderAndRoomComesByWholeSegments) {
  for (uint8_t id = 0; id < 6; ++id) EXPECT_EQ(stored(kDisk, key(id)), id);
  EXPECT_EQ(index_->disk_room(), 0);
  EXPECT_EQ(stored(kDisk, key(6)), 0);
  EXPECT_EQ(index_->disk_room(), 1);
  EXPECT_FALSE(places(key(0)).anywhere());
  EXPECT_FALSE(places(key(1)).anywhere());
  EXPECT_TRUE(places(key(2)).anywhere());
  EXPECT_EQ(index_->counts(kDisk).evicted_dirty, 2u);
  EXPECT_EQ(index_->reports().take_dropped(), (std::vector<Dropped>{{kDisk, 0}}));
}

TEST_F(BlockIndexTest, ASegmentWithAPinStaysAndOneWithNothingUsefulGoesFirst) {
  std::vector<Slot> slots;
  for (uint8_t id = 0; id < 6; ++id) slots.push_back(stored(kDisk, key(id)));
  index_->pin(kDisk, slots[1]);
  stored(kDisk, key(6));  // the second one went
  EXPECT_TRUE(places(key(0)).anywhere());
  EXPECT_FALSE(places(key(2)).anywhere());
  index_->unpin(kDisk, slots[1]);
  index_->damaged(kDisk, slots[4]);
  index_->damaged(kDisk, slots[5]);
  stored(kDisk, key(7));
  stored(kDisk, key(8));  // the third one went, although the first is older
  EXPECT_TRUE(places(key(0)).anywhere());
  EXPECT_EQ(places(key(8)).disk, slots[4]);
}

TEST_F(BlockIndexTest, SegmentsOfARetiredSpaceGoFirst) {
  for (uint8_t id = 0; id < 2; ++id) stored(kDisk, key(id, 1));
  for (uint8_t id = 2; id < 4; ++id) stored(kDisk, key(id, 2));
  for (uint8_t id = 4; id < 6; ++id) stored(kDisk, key(id, 1));
  ASSERT_SUCCEEDS(index_->retire(2));
  EXPECT_EQ(index_->segment_of(stored(kDisk, key(6, 1))), 1);
  EXPECT_EQ(index_->counts(kDisk).evicted_stale, 2u);
}

TEST_F(BlockIndexTest, WhereEachSegmentIsPinnedDiskHasNoRoom) {
  for (uint8_t id = 0; id < 6; ++id) (void)pinned(kDisk, key(id));
  const BlockKey more = key(9);
  EXPECT_FAILS(index_->reserve(kDisk, &more), Code::kResourceExhausted, "disk");
  index_->unpin(kDisk, 0);
  EXPECT_FAILS(index_->reserve(kDisk, &more), Code::kResourceExhausted, "disk");
  index_->unpin(kDisk, 1);
  EXPECT_EQ(reserved(kDisk, more), 0);
}

TEST_F(BlockIndexTest, AClosedSegmentTakesNoMore) {
  EXPECT_EQ(stored(kDisk, key(0)), 0);
  index_->close_segment();
  EXPECT_EQ(stored(kDisk, key(1)), 2);
}

TEST_F(BlockIndexTest, UsedBlocksCanBeReinsertedBeforeTheirSegmentIsEvicted) {
  std::vector<Slot> slots;
  for (uint8_t id = 0; id < 5; ++id) slots.push_back(stored(kDisk, key(id)));
  stored(kHost, key(1));
  use(kDisk, slots[0]);
  const std::vector<LeavingBlock> leaving = index_->leaving();
  ASSERT_EQ(leaving.size(), 2u);
  EXPECT_EQ(leaving[0].key, key(0));
  EXPECT_TRUE(leaving[0].used && !leaving[0].on_host);
  EXPECT_TRUE(!leaving[1].used && leaving[1].on_host);
  EXPECT_FAILS(index_->reinsert(slots[0]), Code::kFailedPrecondition, "pinned");
  index_->pin(kDisk, slots[0]);
  const Slot again = value_of(index_->reinsert(slots[0]));
  EXPECT_EQ(again, 5);
  EXPECT_FAILS(index_->reinsert(slots[0]), Code::kFailedPrecondition, "once");
  EXPECT_EQ(places(key(0)).disk, slots[0]);  // until the copy is proven
  index_->commit(kDisk, again);
  EXPECT_EQ(places(key(0)).disk, again);
  index_->unpin(kDisk, slots[0]);
  index_->unpin(kDisk, again);
  stored(kDisk, key(9));
  EXPECT_EQ(places(key(0)).disk, again);
  EXPECT_FALSE(places(key(1)).disk >= 0);
}

TEST_F(BlockIndexTest, ACopyOnDiskThatFailsOrWhoseSourceIsDamagedLeavesWhatIsProven) {
  const Slot old = pinned(kDisk, key(0));
  Slot again = value_of(index_->reinsert(old));
  index_->abandon(kDisk, again, false);
  EXPECT_EQ(places(key(0)).disk, old);
  again = value_of(index_->reinsert(old));
  index_->damaged(kDisk, old);
  EXPECT_FALSE(places(key(0)).anywhere());
  index_->commit(kDisk, again);
  EXPECT_EQ(places(key(0)).disk, again);
  index_->damaged(kDisk, again);
  EXPECT_EQ(index_->keys(), 0u);
}

TEST_F(BlockIndexTest, TheRemoteStoreIsForgottenByUse) {
  for (uint8_t id = 0; id < 4; ++id) stored(kRemote, key(id));
  EXPECT_EQ(places(key(0)).remote, -1);
  EXPECT_GE(places(key(1)).remote, 0);
  index_->hide_remote(true);
  EXPECT_FALSE(places(key(1)).anywhere());
  index_->hide_remote(false);
  EXPECT_TRUE(places(key(1)).anywhere());
  EXPECT_TRUE(index_->reports().take_dropped().empty());  // there it may still be
}

TEST_F(BlockIndexTest, EachSlotThatIsFreeAgainIsToldOnce) {
  const Slot slot = stored(kHost, key(0));
  index_->damaged(kHost, slot);
  EXPECT_EQ(reserved(kHost, key(1)), slot);
  index_->abandon(kHost, slot, false);
  EXPECT_EQ(index_->reports().take_dropped(), (std::vector<Dropped>{{kHost, slot}}));
  EXPECT_TRUE(index_->reports().take_dropped().empty());
  index_->damaged(kHost, stored(kHost, key(2)));
  EXPECT_EQ(index_->reports().take_dropped().size(), 1u);
}

TEST_F(BlockIndexTest, ACallThatDoesNotFitChangesNothingAndCheckSaysWhich) {
  const auto refuses = [&](std::string_view call, auto&& misuse) {
    SetUp();
    const Slot reserved_slot = reserved(kHost, key(1));
    const Slot visible = stored(kHost, key(2));
    ASSERT_SUCCEEDS(index_->check());
    misuse(reserved_slot, visible);
    EXPECT_FAILS(index_->check(), Code::kInternal, std::string(call) + "()");
    EXPECT_EQ(index_->counts(kHost).reserved, 1);
    EXPECT_EQ(index_->counts(kHost).visible, 1);
    EXPECT_EQ(places(key(2)).host, visible);
  };
  refuses("commit", [&](Slot, Slot visible) { index_->commit(kHost, visible); });
  refuses("abandon", [&](Slot, Slot visible) { index_->abandon(kHost, visible, false); });
  refuses("damaged", [&](Slot reserved, Slot) { index_->damaged(kHost, reserved); });
  refuses("unpin", [&](Slot, Slot visible) { index_->unpin(kHost, visible); });
  refuses("unpin", [&](Slot reserved, Slot) { index_->unpin(kHost, reserved); });
  refuses("pin", [&](Slot, Slot) { index_->pin(kHost, 3); });
  refuses("pin", [&](Slot, Slot) { index_->pin(kHost, -1); });
  refuses("pin", [&](Slot, Slot) { index_->pin(kHost, 4); });
  refuses("back", [&](Slot reserved, Slot) { index_->back(0, ContentVersion{1}, kHost, reserved); });
  refuses("back", [&](Slot, Slot visible) { index_->back(8, ContentVersion{1}, kHost, visible); });
  refuses("back", [&](Slot, Slot visible) { index_->back(0, ContentVersion::kNone, kHost, visible); });
  SetUp();
}

TEST(BlockIndexOptions, BadOnesAreRefusedByName) {
  EXPECT_FAILS(BlockIndex::create({.host_slots = -1}), Code::kInvalidArgument, "host_slots");
  EXPECT_FAILS(BlockIndex::create({.disk_segments = 1, .segment_slots = 4}), Code::kInvalidArgument, "disk_segments");
  EXPECT_FAILS(BlockIndex::create({.disk_segments = 4}), Code::kInvalidArgument, "segment_slots");
  EXPECT_FAILS(BlockIndex::create({.disk_segments = 1 << 20, .segment_slots = 1 << 20}), Code::kInvalidArgument,
               "slots");
  const auto empty = value_of(BlockIndex::create({}));
  const BlockKey any = key(1);
  for (const StoreId store : {kHost, kDisk, kRemote})
    EXPECT_FAILS(empty->reserve(store, &any), Code::kResourceExhausted, name(store));
  BlockLocations found;
  EXPECT_EQ(empty->run({&any, 1}, {&found, 1}), 0u);
  EXPECT_SUCCEEDS(empty->check());
}

}  // namespace
}  // namespace torpor
