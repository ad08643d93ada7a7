// SPDX-License-Identifier: Apache-2.0
#include "kvcache/eviction_order.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

namespace torpor {
namespace {

Digest key(int32_t id) {
  Digest digest;
  std::memcpy(digest.bytes.data(), &id, sizeof id);
  return digest;
}

std::vector<int32_t> evict_all(EvictionOrder& order) {
  std::vector<int32_t> ids;
  while (!order.empty()) ids.push_back(order.evict());
  return ids;
}

// 0, 1 and 2 come in; 0 is hit twice, 1 once, and both come back.
std::unique_ptr<EvictionOrder> small_order(EvictionPolicy policy) {
  auto order = make_eviction_order(policy, 8);
  for (const int32_t id : {0, 1, 2}) order->add(id, key(id), true);
  for (const int32_t id : {0, 1, 0}) {
    order->hit(id);
    order->add(id, key(id), false);
  }
  return order;
}

TEST(EvictionOrder, EachPolicyHasItsOrder) {
  EXPECT_EQ(evict_all(*small_order(EvictionPolicy::kLru)), (std::vector<int32_t>{2, 1, 0}));
  EXPECT_EQ(evict_all(*small_order(EvictionPolicy::kFifo)), (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(evict_all(*small_order(EvictionPolicy::kLfu)), (std::vector<int32_t>{2, 1, 0}));
  EXPECT_EQ(evict_all(*small_order(EvictionPolicy::kS3Fifo)),
            (std::vector<int32_t>{1, 0, 2}));  // 0 went on to the main queue; 2 is within the small one's share
}

TEST(EvictionOrder, LfuCountsHitsBeforeAge) {
  auto order = make_eviction_order(EvictionPolicy::kLfu, 8);
  order->add(0, key(0), true);
  order->hit(0);
  order->add(0, key(0), false);
  order->add(1, key(1), true);  // younger, but never hit
  EXPECT_EQ(evict_all(*order), (std::vector<int32_t>{1, 0}));
}

// A scan of blocks that are never used again does not push out those that are: what LRU cannot do.
TEST(EvictionOrder, S3FifoKeepsWhatIsUsedThroughAScan) {
  constexpr int32_t kBlocks = 20;
  const auto survivors = [](EvictionPolicy policy) {
    auto order = make_eviction_order(policy, kBlocks);
    for (int32_t id = 0; id < 10; ++id) {
      order->add(id, key(id), true);
      for (int hit = 0; hit < 2; ++hit) order->hit(id), order->add(id, key(id), false);
    }
    for (int32_t id = 10; id < kBlocks; ++id) order->add(id, key(id), true);
    for (int32_t scan = 0; scan < 100; ++scan) {
      const int32_t slot = order->evict();
      order->add(slot, key(1000 + scan), true);  // other content in the slot
      if (slot < 10) return 0;                   // a used one went
    }
    return 1;
  };
  EXPECT_EQ(survivors(EvictionPolicy::kLru), 0);
  EXPECT_EQ(survivors(EvictionPolicy::kS3Fifo), 1);
}

TEST(EvictionOrder, S3FifoRemembersWhatItEvictedTooEarly) {
  auto order = make_eviction_order(EvictionPolicy::kS3Fifo, 10);
  order->add(0, key(0), true);
  EXPECT_EQ(order->evict(), 0);
  order->add(0, key(0), true);  // the same content again: into the main queue
  order->add(1, key(1), true);
  order->add(2, key(2), true);
  EXPECT_EQ(order->evict(), 1);
}

TEST(EvictionOrder, UnderRandomUseEveryBlockIsInItOnce) {
  for (const EvictionPolicy policy :
       {EvictionPolicy::kLru, EvictionPolicy::kFifo, EvictionPolicy::kLfu, EvictionPolicy::kS3Fifo}) {
    SCOPED_TRACE(name(policy));
    std::mt19937 random(1);
    auto order = make_eviction_order(policy, 32);
    std::vector<bool> inside(32);
    std::vector<bool> fresh(32, true);
    for (int i = 0; i < 5000; ++i) {
      const auto id = static_cast<int32_t>(random() % 32);
      const auto at = static_cast<size_t>(id);
      if (!inside[at]) {
        order->add(id, key(static_cast<int32_t>(random() % 64)), fresh[at]);
        inside[at] = true;
        fresh[at] = false;
      } else if (random() % 3 == 0) {
        order->discard(id);
        inside[at] = false;
        fresh[at] = true;
      } else if (random() % 2 == 0) {
        order->hit(id);
        inside[at] = false;
      } else {
        const int32_t evicted = order->evict();
        ASSERT_TRUE(inside[static_cast<size_t>(evicted)]);
        inside[static_cast<size_t>(evicted)] = false;
        fresh[static_cast<size_t>(evicted)] = true;
      }
      std::vector<int32_t> ids = order->order();
      std::sort(ids.begin(), ids.end());
      std::vector<int32_t> expected;
      for (int32_t block = 0; block < 32; ++block) {
        if (inside[static_cast<size_t>(block)]) expected.push_back(block);
      }
      ASSERT_EQ(ids, expected);
    }
  }
}

}  // namespace
}  // namespace torpor
