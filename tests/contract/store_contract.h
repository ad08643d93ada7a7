// SPDX-License-Identifier: Apache-2.0
// What every SlotStore must do. A store's test includes this and instantiates it with ways to make one:
//   INSTANTIATE_TEST_SUITE_P(Name, StoreContract, ::testing::Values(way, …));
#pragma once

#include <algorithm>
#include <atomic>
#include <thread>

#include "base/page_buffer.h"
#include "tests/contract/store_world.h"
#include "tests/support/temporary_directory.h"

namespace torpor::test {

class StoreContract : public ::testing::TestWithParam<StoreWay> {
 protected:
  std::unique_ptr<StoreWorld> world_ = GetParam().make();
  SlotStore& store() { return world_->store(); }
};

TEST_P(StoreContract, WhatIsPutComesBackByteForByteFromAndIntoAnyMemory) {
  const std::vector<size_t> sizes = {1, 100, 4095, 4096, 4097, 8192, kContractRecord};
  for (const bool aligned : {true, false}) {
    const std::vector<StoreSlot> slots = world_->fresh(static_cast<int32_t>(sizes.size()));
    std::vector<PageBuffer> buffers(sizes.size());
    std::vector<StorePart> parts;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const std::span<std::byte> room = buffers[i].room(sizes[i] + kPage).subspan(aligned ? 0 : 8, sizes[i]);
      std::memcpy(room.data(), some_bytes(i, sizes[i]).data(), sizes[i]);
      parts.push_back(part_of(slots[i], i, room));
    }
    put(store(), parts);
    for (size_t i = 0; i < sizes.size(); ++i) {
      ASSERT_SUCCEEDS(parts[i].status);
      EXPECT_EQ(parts[i].record.bytes, sizes[i]);
      EXPECT_EQ(std::memcmp(parts[i].bytes.data(), some_bytes(i, sizes[i]).data(), sizes[i]), 0);  // unchanged
      std::memset(parts[i].bytes.data(), 0xee, sizes[i]);
    }
    std::vector<StorePart> back;
    for (size_t i = sizes.size(); i-- > 0;) back.push_back({.slot = slots[i], .bytes = parts[i].bytes});
    get(store(), back);
    for (size_t i = 0; i < sizes.size(); ++i) {
      const StorePart& part = back[sizes.size() - 1 - i];
      ASSERT_SUCCEEDS(part.status);
      EXPECT_EQ(part.record, parts[i].record);
      EXPECT_EQ(std::memcmp(part.bytes.data(), some_bytes(i, sizes[i]).data(), sizes[i]), 0) << sizes[i];
    }
  }
}

TEST_P(StoreContract, ManyAtOnceAreEachWhereTheyBelong) {
  const std::vector<StoreSlot> slots = world_->fresh(60);
  std::vector<std::vector<std::byte>> bytes;
  std::vector<StorePart> parts;
  for (size_t i = 0; i < slots.size(); ++i) bytes.push_back(some_bytes(i, 4096 + i));
  for (size_t i = 0; i < slots.size(); ++i) parts.push_back(part_of(slots[i], i, bytes[i]));
  put(store(), parts);
  for (const StorePart& part : parts) ASSERT_SUCCEEDS(part.status);
  for (size_t i = 0; i < slots.size(); ++i) EXPECT_TRUE(value_of(has_one(store(), slots[i], i, 4096 + i))) << i;
  for (std::vector<std::byte>& each : bytes) std::fill(each.begin(), each.end(), std::byte{0});
  std::reverse(parts.begin(), parts.end());
  get(store(), parts);
  for (const StorePart& part : parts) ASSERT_SUCCEEDS(part.status);
  for (size_t i = 0; i < slots.size(); ++i) EXPECT_EQ(bytes[i], some_bytes(i, 4096 + i)) << i;
}

TEST_P(StoreContract, EachPartHasItsOwnStatus) {
  const std::vector<StoreSlot> slots = world_->fresh(3);
  std::vector<std::byte> good = some_bytes(1, 5000);
  std::vector<std::byte> large(kContractRecord + 1);
  std::vector<StorePart> parts = {part_of(slots[0], 1, good), part_of(-1, 2, good), part_of(slots[1], 3, {}),
                                  part_of(slots[1], 4, large), part_of(slots[2], 1, good)};
  put(store(), parts);
  EXPECT_SUCCEEDS(parts[0].status);
  for (const size_t i : {1, 2, 3}) EXPECT_FAILS(parts[i].status, Code::kInvalidArgument);
  EXPECT_SUCCEEDS(parts[4].status);

  std::vector<std::byte> a(5000);
  std::vector<std::byte> b(5000);
  std::vector<std::byte> short_one(4999);
  std::vector<StorePart> back = {{.slot = slots[1], .bytes = b},
                                 {.slot = slots[0], .bytes = a},
                                 {.slot = -5, .bytes = b},
                                 {.slot = slots[2], .bytes = short_one},
                                 {.slot = slots[2], .bytes = b}};
  get(store(), back);
  EXPECT_FAILS(back[0].status, Code::kNotFound);
  EXPECT_SUCCEEDS(back[1].status);
  EXPECT_FAILS(back[2].status, Code::kInvalidArgument);
  EXPECT_FAILS(back[3].status, Code::kInvalidArgument, "5000");
  EXPECT_SUCCEEDS(back[4].status);
  EXPECT_EQ(a, good);
  EXPECT_EQ(b, good);
}

TEST_P(StoreContract, WhatIsDroppedIsNotFoundAndTheRestIs) {
  const std::vector<StoreSlot> slots = world_->fresh(5);
  for (size_t i = 0; i < slots.size(); ++i) ASSERT_SUCCEEDS(put_one(store(), slots[i], i));
  const SlotRange ranges[] = {{.first = slots[1], .count = 2}, {.first = slots[4], .count = 1}};
  store().drop(ranges);
  store().drop(ranges);  // again: nothing happens
  for (const size_t i : {0, 3}) EXPECT_TRUE(value_of(has_one(store(), slots[i], i)));
  for (const size_t i : {1, 2, 4}) EXPECT_FAILS(has_one(store(), slots[i], i), Code::kNotFound);
  EXPECT_GE(store().health().dropped_bytes, 3 * 4096u);
  const SlotRange nonsense[] = {{.first = -100, .count = 50}, {.first = world_->beyond(), .count = 1 << 30}};
  store().drop(nonsense);
  EXPECT_TRUE(value_of(has_one(store(), slots[0], 0)));
}

TEST_P(StoreContract, WithoutRoomAPutFailsAndNothingElseIsLost) {
  const std::vector<StoreSlot> slots = world_->fresh(2);
  ASSERT_SUCCEEDS(put_one(store(), slots[0], 1));
  EXPECT_FALSE(put_one(store(), world_->beyond(), 2).has_value());
  ASSERT_SUCCEEDS(put_one(store(), slots[1], 3));
  EXPECT_TRUE(value_of(has_one(store(), slots[0], 1)));
  EXPECT_TRUE(value_of(has_one(store(), slots[1], 3)));
  EXPECT_FAILS(has_one(store(), world_->beyond(), 2), Code::kNotFound);
}

TEST_P(StoreContract, AMediumThatFailsIsSaidAndAfterwardsItGoesOn) {
  const std::vector<StoreSlot> slots = world_->fresh(2);
  ASSERT_SUCCEEDS(put_one(store(), slots[0], 1));
  if (!world_->fail(true)) GTEST_SKIP() << "it cannot fail";
  EXPECT_FALSE(has_one(store(), slots[0], 1).has_value());
  EXPECT_FALSE(put_one(store(), slots[1], 2).has_value());
  EXPECT_TRUE(store().health().degraded);
  EXPECT_FALSE(store().accepting());
  EXPECT_NE(store().health().reason, "");
  EXPECT_EQ(store().health().write_errors, 1u);
  EXPECT_EQ(store().health().read_errors, 1u);
  world_->fail(false);
  EXPECT_TRUE(value_of(has_one(store(), slots[0], 1)));
  ASSERT_TRUE(store().accepting());
  const StoreSlot other = world_->fresh(1)[0];
  EXPECT_SUCCEEDS(put_one(store(), other, 3));
  EXPECT_TRUE(value_of(has_one(store(), other, 3)));
  EXPECT_FALSE(store().health().degraded);
  EXPECT_FAILS(has_one(store(), slots[1], 2), Code::kNotFound);
}

TEST_P(StoreContract, ThreadsPutGetDropAndSyncAtOnce) {
  constexpr int kThreads = 4;
  constexpr int kEach = 12;
  const std::vector<StoreSlot> slots = world_->fresh(kThreads * kEach);
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kEach; ++i) {
        const StoreSlot slot = slots[static_cast<size_t>(i * kThreads + t)];
        const auto seed = static_cast<uint64_t>(slot);
        if (!put_one(store(), slot, seed)) ++wrong;
        const Result<bool> right = has_one(store(), slot, seed);
        if (!right || !*right) ++wrong;
        if (i % 5 == t && !store().sync()) ++wrong;
        if (i % 3 != 0) continue;
        const SlotRange range{.first = slot, .count = 1};
        store().drop({&range, 1});
        if (has_one(store(), slot, seed)) ++wrong;
        (void)store().health();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// While somebody reads, somebody drops: it is read whole, or not found.
TEST_P(StoreContract, WhatIsDroppedWhileItIsReadIsReadWholeOrNotFound) {
  if (store().traits().addressable) GTEST_SKIP() << "pins are the caller's";
  const std::vector<StoreSlot> slots = world_->fresh(40);
  for (const StoreSlot slot : slots) ASSERT_SUCCEEDS(put_one(store(), slot, static_cast<uint64_t>(slot)));
  std::atomic<bool> stop = false;
  std::atomic<int> wrong = 0;
  std::thread reader([&] {
    while (!stop) {
      for (const StoreSlot slot : slots) {
        const Result<bool> right = has_one(store(), slot, static_cast<uint64_t>(slot));
        if (right ? !*right : right.error().code != Code::kNotFound) ++wrong;
      }
    }
  });
  const SlotRange range{.first = slots[0], .count = static_cast<int32_t>(slots.size())};
  store().drop({&range, 1});
  stop = true;
  reader.join();
  EXPECT_EQ(wrong, 0);
}

TEST_P(StoreContract, WhatIsOnlyPlacedIsNotFound) {
  const StoreSlot slot = world_->fresh(1)[0];
  SavedChunk chunk{.bytes = 5000, .offset = static_cast<uint64_t>(slot)};
  const Result<std::span<std::byte>> place = store().place(chunk);
  if (!store().traits().addressable) {
    EXPECT_FAILS(place, Code::kUnsupported);
    EXPECT_FAILS(store().placed(slot, {}), Code::kUnsupported);
    EXPECT_TRUE(store().view(chunk).empty());
    return;
  }
  ASSERT_SUCCEEDS(place);
  ASSERT_EQ(place->size(), 5000u);
  EXPECT_FAILS(has_one(store(), slot, 1, 5000), Code::kNotFound);
  std::memcpy(place->data(), some_bytes(1, 5000).data(), 5000);
  ASSERT_SUCCEEDS(store().placed(slot, digest_of(*place)));
  EXPECT_TRUE(value_of(has_one(store(), slot, 1, 5000)));
  EXPECT_EQ(store().view(chunk).data(), place->data());
  const SlotRange range{.first = slot, .count = 1};
  store().drop({&range, 1});
  EXPECT_TRUE(store().view(chunk).empty());
  EXPECT_FAILS(store().placed(slot, {}), Code::kNotFound);
  chunk.bytes = kContractRecord + 1;
  EXPECT_FAILS(store().place(chunk), Code::kInvalidArgument);
}

TEST_P(StoreContract, BytesAreCounted) {
  const std::vector<StoreSlot> slots = world_->fresh(2);
  const StoreHealth before = store().health();
  ASSERT_SUCCEEDS(put_one(store(), slots[0], 1));
  ASSERT_TRUE(value_of(has_one(store(), slots[0], 1)));
  ASSERT_TRUE(value_of(has_one(store(), slots[0], 1)));
  const StoreHealth after = store().health();
  EXPECT_GT(after.put_bytes, before.put_bytes);
  EXPECT_EQ(after.got_bytes - before.got_bytes, 2 * (after.put_bytes - before.put_bytes));
  EXPECT_NE(after.io, "");
  EXPECT_GE(after.held_bytes, after.put_bytes - after.dropped_bytes);
}

TEST_P(StoreContract, WhatWasSyncedIsThereForTheNextProcess) {
  const std::vector<StoreSlot> slots = world_->fresh(45);
  for (size_t i = 0; i < slots.size(); ++i) ASSERT_SUCCEEDS(put_one(store(), slots[i], i, 4096 + i));
  ASSERT_SUCCEEDS(store().sync());
  SlotStore* again = world_->reopen();
  if (again == nullptr) {
    EXPECT_FALSE(store().traits().durable);
    EXPECT_FAILS(store().recover(1), Code::kUnsupported);
    const test::TemporaryDirectory temporary;
    const auto into = value_of(linux_file_system().open_directory(temporary.path(), false));
    EXPECT_FAILS(store().lease(slots, *into), Code::kUnsupported);
    return;
  }
  std::vector<RecoveredSlot> found = value_of(again->recover(1));
  ASSERT_EQ(found.size(), slots.size());
  for (const RecoveredSlot& each : found) {
    const auto i = static_cast<size_t>(std::find(slots.begin(), slots.end(), each.slot) - slots.begin());
    ASSERT_LT(i, slots.size());
    EXPECT_EQ(each.key, some_key(i));
    EXPECT_EQ(each.record.bytes, 4096 + i);
    EXPECT_EQ(each.record.digest, digest_of(some_bytes(i, 4096 + i)));
    EXPECT_TRUE(value_of(has_one(*again, each.slot, i, 4096 + i)));
  }
  EXPECT_GE(again->health().recovered_bytes, 45 * 3000u);
}

}  // namespace torpor::test
