// SPDX-License-Identifier: Apache-2.0
#include "scheduler_state/kv_snapshot.h"

#include <algorithm>
#include <functional>

#include <rapidcheck.h>

#include "tests/support/example_state.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

KvSnapshot example_kv() { return test::example_checkpoint().state.kv; }

TEST(KvSnapshot, AConsistentOneIsValid) { EXPECT_SUCCEEDS(example_kv().validate()); }

// Every single contradiction is found, and named.
TEST(KvSnapshot, EachContradictionIsFound) {
  struct Case {
    const char* part;
    std::function<void(KvSnapshot&)> damage;
  };
  const Case cases[] = {
      {"null block", [](KvSnapshot& kv) { kv.num_blocks = 0; }},
      {"null block", [](KvSnapshot& kv) { kv.null_block = 8; }},
      {"block 9", [](KvSnapshot& kv) { kv.blocks[3].id = 9; }},
      {"block 0", [](KvSnapshot& kv) { kv.blocks[3].id = 0; }},
      {"block -3", [](KvSnapshot& kv) { kv.blocks[3].id = -3; }},
      {"block 3 is listed twice", [](KvSnapshot& kv) { kv.blocks[3].id = 3; }},
      {"references", [](KvSnapshot& kv) { kv.blocks[0].ref_count = 3; }},
      {"references", [](KvSnapshot& kv) { kv.blocks[0].ref_count = -1; }},
      {"neither a reference nor a hash", [](KvSnapshot& kv) { kv.blocks[3].hash.clear(); }},
      {"block size", [](KvSnapshot& kv) { kv.groups[0].block_size = 0; }},
      {"two tables", [](KvSnapshot& kv) { kv.groups[0].tables[1].request = "run"; }},
      {"are cached", [](KvSnapshot& kv) { kv.groups[0].tables[0].num_cached_blocks = 3; }},
      {"not listed",
       [](KvSnapshot& kv) {
         kv.groups[0].tables[0].blocks = {1, 7};
       }},
      {"prefix index", [](KvSnapshot& kv) { kv.prefix_index[0].blocks = {2}; }},
      {"prefix index", [](KvSnapshot& kv) { kv.prefix_index.pop_back(); }},
      {"twice",
       [](KvSnapshot& kv) {
         kv.prefix_index[0].blocks = {1, 1};
       }},
      {"empty", [](KvSnapshot& kv) { kv.prefix_index[0].blocks.clear(); }},
      {"extra hashes",
       [](KvSnapshot& kv) {
         kv.extra_hashes = {{7, {{1}}}};
       }},
      {"free order", [](KvSnapshot& kv) { kv.free_order.pop_back(); }},
      {"free order", [](KvSnapshot& kv) { kv.free_order[0] = 0; }},
      {"twice", [](KvSnapshot& kv) { kv.free_order[0] = 6; }},
      {"in use and in the free order", [](KvSnapshot& kv) { kv.free_order[0] = 2; }},
      {"free", [](KvSnapshot& kv) { kv.num_blocks = INT32_MAX; }},  // and takes no time for each of them
  };
  for (const Case& c : cases) {
    KvSnapshot kv = example_kv();
    c.damage(kv);
    EXPECT_FAILS(kv.validate(), Code::kCorruption, c.part);
  }
}

TEST(KvSnapshot, FreeBlocksThatNobodyNamedComeFirst) {
  const KvSnapshot whole = example_kv();
  ASSERT_GT(whole.free_order.size(), 2u);
  KvSnapshot kv = whole;
  kv.complete_free_order();
  EXPECT_EQ(kv, whole);
  kv.free_order = {whole.free_order.back()};
  kv.complete_free_order();
  EXPECT_EQ(kv.free_order.back(), whole.free_order.back());
  EXPECT_TRUE(std::is_sorted(kv.free_order.begin(), kv.free_order.end() - 1));
  EXPECT_SUCCEEDS(kv.validate());
  kv.free_order = {kv.num_blocks, -1};
  kv.complete_free_order();
  EXPECT_FAILS(kv.validate(), Code::kCorruption, "free order");
}

TEST(KvSnapshot, BlocksOfAllGroupsAreCounted) {
  const KvSnapshot two = test::example_of_two_groups().state.kv;
  ASSERT_SUCCEEDS(two.validate());
  EXPECT_EQ(select_live_blocks(two, 10, 0).kept, (std::vector<int32_t>{1, 2, 3, 5, 6}));
  KvSnapshot kv = two;
  kv.groups[1].tables[0].blocks[0] = 7;
  EXPECT_FAILS(kv.validate(), Code::kCorruption, "block 7, which is not listed");
  kv = two;
  kv.groups[1].tables[0].blocks[0] = 2;  // a block belongs to one group; here two tables hold it
  EXPECT_FAILS(kv.validate(), Code::kCorruption, "block 2 says 1 references, tables hold 2");
  kv = two;
  kv.groups[1].tables[1].blocks[1] = kv.null_block;
  EXPECT_FAILS(kv.validate(), Code::kCorruption, "block 6 says 1 references, tables hold 0");
}

TEST(LiveBlocks, ReferencedBlocksAreAlwaysKept) {
  const LiveBlocks live = select_live_blocks(example_kv(), 10, 0);
  EXPECT_EQ(live.kept, (std::vector<int32_t>{1, 2, 3}));
  EXPECT_EQ(live.dropped, (std::vector<int32_t>{4}));
  EXPECT_EQ(select_live_blocks(example_kv(), 10, 9).dropped.size(), 1u);
  EXPECT_EQ(select_live_blocks(example_kv(), 10, 10).dropped.size(), 0u);
  EXPECT_EQ(select_live_blocks(example_kv(), 10, std::nullopt).kept.size(), 4u);
}

TEST(LiveBlocks, CachedBlocksAreKeptInTheOrderInWhichTheyWouldBeEvictedLast) {
  KvSnapshot kv{.num_blocks = 6, .null_block = -1};
  for (int32_t id = 0; id < 6; ++id) {
    const Bytes hash{static_cast<uint8_t>(id + 1)};
    kv.blocks.push_back({id, 0, hash, 4});
    kv.prefix_index.push_back({hash, {id}});
  }
  kv.free_order = {3, 0, 5, 1, 4, 2};
  ASSERT_SUCCEEDS(kv.validate());
  const LiveBlocks live = select_live_blocks(kv, 100, 250);
  EXPECT_EQ(live.kept, (std::vector<int32_t>{2, 4}));
  drop_hashes(kv, live.dropped);
  EXPECT_SUCCEEDS(kv.validate());
  EXPECT_EQ(kv.prefix_index.size(), 2u);
}

// Whatever the pool looks like and whatever the budget: what remains is valid, fits, and names only kept bytes.
TEST(LiveBlocks, AfterDroppingEveryHashHasItsBytes) {
  const bool held = rc::check([] {
    const int count = *rc::gen::inRange(1, 40);
    KvSnapshot kv{.num_blocks = count, .null_block = -1};
    kv.groups = {{.block_size = 4}};
    KvTable table{.request = "r"};
    std::vector<int32_t> free;
    for (int32_t id = 0; id < count; ++id) {
      const bool used = *rc::gen::arbitrary<bool>();
      const bool hashed = *rc::gen::arbitrary<bool>();
      KvBlock block{.id = id, .ref_count = used ? 1 : 0};
      if (hashed) {
        block.hash = {static_cast<uint8_t>(*rc::gen::inRange(0, 20))};  // some blocks share one
        block.hash_tokens = 4;
        const auto entry = std::find_if(kv.prefix_index.begin(), kv.prefix_index.end(),
                                        [&](const PrefixEntry& e) { return e.hash == block.hash; });
        if (entry == kv.prefix_index.end()) {
          kv.prefix_index.push_back({block.hash, {id}});
        } else {
          entry->blocks.push_back(id);
        }
      }
      if (used) table.blocks.push_back(id);
      if (!used) free.insert(free.begin() + *rc::gen::inRange<size_t>(0, free.size() + 1), id);
      if (used || hashed) kv.blocks.push_back(block);
    }
    kv.groups[0].tables = {table};
    kv.free_order = free;
    RC_ASSERT(kv.validate().has_value());
    const uint64_t budget = *rc::gen::inRange<uint64_t>(0, 400);
    const LiveBlocks live = select_live_blocks(kv, 10, budget);
    RC_ASSERT((live.kept.size() - table.blocks.size()) * 10 <= budget);
    drop_hashes(kv, live.dropped);
    RC_ASSERT(kv.validate().has_value());
    for (const KvBlock& block : kv.blocks) {
      RC_ASSERT(std::binary_search(live.kept.begin(), live.kept.end(), block.id));
    }
  });
  EXPECT_TRUE(held);
}

// Blocks 1 to 9; the last of each request has no hash, and 9 is cached.
TEST(LateBlocks, AreThoseWithAHashThatTheFirstRequestsDoNotHave) {
  KvSnapshot kv{.num_blocks = 10};
  kv.groups = {{.block_size = 4,
                .tables = {{.request = "b", .blocks = {1, 4, 5}},
                           {.request = "a", .blocks = {1, 2, 3}},
                           {.request = "c", .blocks = {6, 7, 8}}}}};
  for (const int32_t id : {1, 2, 4, 6, 7, 9}) kv.blocks.push_back({.id = id, .hash = {static_cast<uint8_t>(id)}});
  for (const int32_t id : {3, 5, 8}) kv.blocks.push_back({.id = id, .ref_count = 1});
  const std::vector<std::string> requests{"new", "a", "b", "c"};
  const std::vector<int32_t> blocks{1, 2, 3, 4, 5, 6, 7, 8, 9};
  using Ids = std::vector<int32_t>;
  EXPECT_EQ(deferred_blocks(kv, requests, blocks, 0), (Ids{4, 6, 7, 9}));  // one request in any case
  EXPECT_EQ(deferred_blocks(kv, requests, blocks, 4), (Ids{4, 6, 7, 9}));
  EXPECT_EQ(deferred_blocks(kv, requests, blocks, 5), (Ids{6, 7, 9}));  // two that share a block
  EXPECT_EQ(deferred_blocks(kv, requests, blocks, 100), Ids{9});
  EXPECT_EQ(deferred_blocks(kv, {}, blocks, 100), (Ids{1, 2, 4, 6, 7, 9}));
  for (KvBlock& block : kv.blocks) block.ref_count = block.id == 9 || block.id == 3 ? 0 : 1;
  EXPECT_EQ(cached_blocks(kv, blocks), Ids{9});
}

}  // namespace
}  // namespace torpor
