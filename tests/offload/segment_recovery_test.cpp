// SPDX-License-Identifier: Apache-2.0
// What a restart believes of segments, and what not. I8.
#include "tests/offload/disk_world.h"

namespace torpor {
namespace {

using namespace test;

TEST(SegmentStore, I8WhateverByteOfADescriptionIsWrongItEndsThere) {
  for (const bool sealed : {false, true}) {
    const SegmentStoreOptions options = {.key = sealed ? a_key(1) : nullptr};
    DiskWorld probe(options);
    put_batches(probe.store(), 0, 4, 2);
    const uint64_t second = kPage + kPage + 2 * kContractRecord;  // the second batch page
    for (const uint64_t at :
         {uint64_t{0}, uint64_t{9}, uint64_t{17}, uint64_t{33}, uint64_t{50}, uint64_t{100}, uint64_t{4000}, second,
          second + 9, second + 25, second + 40, second + 120, second + 4000}) {
      DiskWorld world(options);
      put_batches(world.store(), 0, 4, 2);
      ASSERT_SUCCEEDS(world.store().sync());
      flip(world.file(0), at);
      world.open();
      EXPECT_EQ(recovered_by(world.store()), at < second ? std::set<StoreSlot>{} : (std::set<StoreSlot>{0, 1})) << at;
    }
  }
}

TEST(SegmentStore, I8AWrongByteOfARecordIsSeen) {
  for (const SegmentStoreOptions& options : {SegmentStoreOptions{}, SegmentStoreOptions{.key = a_key(1)},
                                             SegmentStoreOptions{.key = a_key(1), .encrypt = true}}) {
    DiskWorld world(options);
    put_batches(world.store(), 0, 2, 2);
    flip(world.file(0), 2 * kPage + 5000);
    const Result<bool> right = has_one(world.store(), 0, 0);
    if (options.key == nullptr) {
      EXPECT_FALSE(value_of(right));
    } else {
      EXPECT_FAILS(right, Code::kCorruption, "not what was sealed");
    }
    EXPECT_TRUE(value_of(has_one(world.store(), 1, 1)));
  }
}

TEST(SegmentStore, RecoveryEndsAtATornBatchWhateverLiesBehind) {
  DiskWorld world;
  put_batches(world.store(), 0, 6, 2);
  ASSERT_SUCCEEDS(world.store().sync());
  flip(world.file(0), kPage + kPage + 2 * kContractRecord + 30);
  world.open();
  EXPECT_EQ(recovered_by(world.store()), (std::set<StoreSlot>{0, 1}));
}

TEST(SegmentStore, TruncatedAtAnyPageWhatLiesBeforeIsFound) {
  const uint64_t batch = kPage + 2 * kContractRecord;
  for (uint64_t pages = 0; pages <= 1 + 3 * 7; ++pages) {
    DiskWorld world;
    put_batches(world.store(), 0, 6, 2);
    ASSERT_SUCCEEDS(world.store().sync());
    boost::filesystem::resize_file(world.file(0), pages * kPage);
    world.open();
    const uint64_t whole = pages == 0 ? 0 : (pages - 1) * kPage / batch;
    EXPECT_EQ(recovered_by(world.store()).size(), 2 * whole) << pages;
    EXPECT_EQ(boost::filesystem::exists(world.file(0)), whole > 0);
  }
}

TEST(SegmentStore, SegmentsWithAnotherKeyOrOfAnotherKindAreNotBelieved) {
  const std::vector<SegmentStoreOptions> kinds = {
      {}, {.key = a_key(1)}, {.key = a_key(2)}, {.key = a_key(1), .encrypt = true}};
  for (size_t a = 0; a < kinds.size(); ++a) {
    for (size_t b = 0; b < kinds.size(); ++b) {
      DiskWorld world(kinds[a]);
      put_batches(world.store(), 0, 3, 3);
      world.options().key = kinds[b].key;
      world.options().encrypt = kinds[b].encrypt;
      world.open();
      EXPECT_EQ(recovered_by(world.store()).size(), a == b ? 3u : 0u) << a << b;
    }
  }
  for (const int changed : {0, 1}) {
    DiskWorld world;
    put_batches(world.store(), 0, 3, 3);
    if (changed == 0) world.options().slots_per_segment = kSlots + 1;
    if (changed == 1) {  // the segment of another rank
      world.options().rank = 6;
      boost::filesystem::rename(world.path() + "/r3", world.path() + "/r6");
    }
    world.open();
    EXPECT_EQ(recovered_by(world.store()).size(), 0u);
  }
}

TEST(SegmentStore, ASegmentUnderAnotherNameIsNotBelieved) {
  DiskWorld world;
  put_batches(world.store(), 0, 3, 3);
  world.open();
  boost::filesystem::rename(world.file(0), world.file(7));
  world.open();
  EXPECT_EQ(world.store().first_slot(), 8 * kSlots);
  EXPECT_EQ(recovered_by(world.store()).size(), 0u);
}

TEST(SegmentStore, WhatCannotBeReadAtTheStartIsLeftThere) {
  DiskWorld world;
  put_batches(world.store(), 0, 3, 3);
  world.open();
  world.files.plan.set(Fault::kError, 1);  // open
  EXPECT_EQ(recovered_by(world.store()).size(), 0u);
  world.files.plan.clear();
  EXPECT_EQ(world.store().health().read_errors, 1u);
  EXPECT_TRUE(boost::filesystem::exists(world.file(0)));
  world.open();
  EXPECT_EQ(recovered_by(world.store()).size(), 3u);
}

}  // namespace
}  // namespace torpor
