// SPDX-License-Identifier: Apache-2.0
#include "scheduler_state/block_numbers.h"

#include <algorithm>
#include <map>
#include <set>

#include <fmt/ranges.h>
#include <rapidcheck.h>

#include "tests/support/example_state.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using Numbers = std::vector<int32_t>;

KvSnapshot saved_kv() { return test::example_checkpoint().state.kv; }  // 1, 2, 3 held, 4 cached, of 8

// The same content in an engine with so many blocks.
KvSnapshot in_engine_of(KvSnapshot kv, int32_t num_blocks) {
  renumber(kv, test::value_of(plan_block_numbers(kv, num_blocks)));
  return kv;
}

TEST(BlockNumbers, WithAsManyBlocksNothingChanges) {
  const BlockNumbers numbers = test::value_of(plan_block_numbers(saved_kv(), 8));
  EXPECT_EQ(numbers.new_number, (Numbers{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(in_engine_of(saved_kv(), 8), saved_kv());
}

TEST(BlockNumbers, WithMoreTheRestIsFreeAndTakenFirst) {
  KvSnapshot expected = saved_kv();
  expected.num_blocks = 10;
  expected.free_order = {8, 9, 5, 6, 7, 4};
  EXPECT_EQ(in_engine_of(saved_kv(), 10), expected);
}

TEST(BlockNumbers, WithFewerWhatStandsBeyondMoves) {
  KvSnapshot kv = saved_kv();  // 2 and 4 are 6 and 7 there
  kv.groups[0].tables[0].blocks = {1, 6};
  kv.blocks = {{1, 2, {11}, 4}, {3, 1, {}, 0}, {6, 1, {}, 0}, {7, 0, {44}, 4}};
  kv.prefix_index[1].blocks = {7};
  kv.extra_hashes = {{7, {{45}}}};
  kv.prefix_index.push_back({{45}, {7}});
  kv.free_order = {5, 4, 7, 2};
  ASSERT_SUCCEEDS(kv.validate());

  KvSnapshot five = in_engine_of(kv, 6);
  EXPECT_EQ(five.num_blocks, 6);
  EXPECT_EQ(five.groups[0].tables[0].blocks, (Numbers{1, 2}));
  EXPECT_EQ(five.groups[0].tables[1].blocks, (Numbers{1, 3}));
  EXPECT_EQ(five.blocks, (std::vector<KvBlock>{{1, 2, {11}, 4}, {2, 1, {}, 0}, {3, 1, {}, 0}, {4, 0, {44}, 4}}));
  EXPECT_EQ(five.prefix_index[1].blocks, Numbers{4});
  EXPECT_EQ(five.prefix_index[2].blocks, Numbers{4});
  EXPECT_EQ(five.extra_hashes[0].block, 4);
  EXPECT_EQ(five.free_order, (Numbers{5, 4}));  // 4 where 7 stood
  EXPECT_EQ(five.block_numbers, (Numbers{0, 1, -1, 3, -1, 5, 2, 4}));
  EXPECT_SUCCEEDS(five.validate());

  const BlockNumbers without_room = test::value_of(plan_block_numbers(kv, 4));
  EXPECT_EQ(without_room.dropped, Numbers{7});
  const KvSnapshot four = in_engine_of(kv, 4);
  EXPECT_EQ(four.prefix_index, (std::vector<PrefixEntry>{{{11}, {1}}}));
  EXPECT_TRUE(four.extra_hashes.empty() && four.free_order.empty());
  EXPECT_SUCCEEDS(four.validate());
}

TEST(BlockNumbers, OfCachedOnesThoseStayThatWouldBeEvictedLast) {
  KvSnapshot kv{.num_blocks = 6, .null_block = -1};
  for (int32_t id = 0; id < 6; ++id) {
    const Bytes hash{static_cast<uint8_t>(id + 1)};
    kv.blocks.push_back({id, 0, hash, 4});
    kv.prefix_index.push_back({hash, {id}});
  }
  kv.free_order = {3, 0, 5, 1, 4, 2};
  const KvSnapshot two = in_engine_of(kv, 2);
  EXPECT_EQ(two.free_order, (Numbers{1, 0}));  // 4, 2
  EXPECT_EQ(two.blocks[0].hash, Bytes{3});
  EXPECT_EQ(two.blocks[1].hash, Bytes{5});
}

TEST(BlockNumbers, TooFewAreRefusedWithTheNumberThatWouldDo) {
  EXPECT_EQ(fewest_blocks(saved_kv()), 4);
  EXPECT_SUCCEEDS(plan_block_numbers(saved_kv(), 4));
  EXPECT_FAILS(plan_block_numbers(saved_kv(), 3), Code::kIncompatible, "hold 3 KV blocks, and this engine has 3");
  EXPECT_EQ(plan_block_numbers(saved_kv(), 3).error().next_step, "start the engine with 4 KV blocks or more");
  EXPECT_FAILS(plan_block_numbers(saved_kv(), 0), Code::kIncompatible);
  const KvSnapshot groups = test::example_of_two_groups().state.kv;
  EXPECT_EQ(fewest_blocks(groups), 6);
  EXPECT_SUCCEEDS(in_engine_of(groups, 6).validate());
}

// A valid state: two groups, blocks that several requests share, that carry the same hash or several ones, in any order
// of eviction.
KvSnapshot any_kv() {
  const int count = *rc::gen::inRange(2, 40);
  KvSnapshot kv{.num_blocks = count, .null_block = *rc::gen::arbitrary<bool>() ? 0 : -1};
  kv.groups = {{.block_size = 4, .tables = {{"a", {}, -1}, {"b", {}, -1}}},
               {.block_size = 8, .tables = {{"a", {}, -1}}}};
  const auto index = [&](int32_t id, const Bytes& hash) {
    const auto entry = std::find_if(kv.prefix_index.begin(), kv.prefix_index.end(),
                                    [&](const PrefixEntry& e) { return e.hash == hash; });
    entry == kv.prefix_index.end() ? kv.prefix_index.push_back({hash, {id}}) : entry->blocks.push_back(id);
  };
  for (int32_t id = 0; id < count; ++id) {
    if (id == kv.null_block) continue;
    KvBlock block{.id = id};
    if (*rc::gen::inRange(0, 3) == 0) {
      const bool window = *rc::gen::arbitrary<bool>();
      block.ref_count = window ? 1 : *rc::gen::inRange(1, 3);
      for (int i = 0; i < block.ref_count; ++i) {
        Numbers& table = kv.groups[window ? 1 : 0].tables[static_cast<size_t>(i)].blocks;
        if (window && kv.null_block == 0) table.push_back(0);
        table.push_back(id);
      }
    }
    if (*rc::gen::arbitrary<bool>()) {
      block.hash = {static_cast<uint8_t>(*rc::gen::inRange(0, 20))};
      block.hash_tokens = 4;
      index(id, block.hash);
      if (*rc::gen::inRange(0, 4) == 0) {
        kv.extra_hashes.push_back({id, {{static_cast<uint8_t>(100 + id)}}});
        index(id, {static_cast<uint8_t>(100 + id)});
      }
    }
    if (block.ref_count == 0)
      kv.free_order.insert(kv.free_order.begin() + *rc::gen::inRange<size_t>(0, kv.free_order.size() + 1), id);
    if (block.ref_count > 0 || !block.hash.empty()) kv.blocks.push_back(block);
  }
  return kv;
}

// Who has a block and how it is found, without its number: what must not depend on the number.
std::multiset<std::string> contents_of(const KvSnapshot& kv, const std::set<int32_t>& without = {}) {
  std::map<int32_t, std::string> contents;
  for (const KvBlock& block : kv.blocks)
    contents[block.id] = fmt::format("{} {}", block.ref_count, fmt::join(block.hash, ","));
  for (size_t group = 0; group < kv.groups.size(); ++group) {
    for (const KvTable& table : kv.groups[group].tables) {
      for (size_t at = 0; at < table.blocks.size(); ++at) {
        if (table.blocks[at] != kv.null_block)
          contents[table.blocks[at]] += fmt::format(" {} {} {}", group, table.request, at);
      }
    }
  }
  for (const PrefixEntry& entry : kv.prefix_index) {
    for (const int32_t id : entry.blocks) contents[id] += fmt::format(" key {}", fmt::join(entry.hash, ","));
  }
  std::multiset<std::string> all;
  for (const auto& [id, content] : contents) {
    if (!without.contains(id)) all.insert(content);
  }
  return all;
}

// Whatever the state and the engine: the same content under other numbers, but for what was dropped; and only as much
// is dropped as must be, the first to be evicted first.
TEST(BlockNumbers, OnlyNumbersChange) {
  const bool held = rc::check([] {
    const KvSnapshot saved = any_kv();
    RC_ASSERT(saved.validate().has_value());
    const int32_t count = *rc::gen::inRange(1, 60);
    const Result<BlockNumbers> numbers = plan_block_numbers(saved, count);
    RC_ASSERT(numbers.has_value() == (count >= fewest_blocks(saved)));
    if (!numbers) return;
    KvSnapshot here = saved;
    renumber(here, *numbers);
    RC_ASSERT(here.num_blocks == count);
    RC_ASSERT(here.validate().has_value());
    const std::set<int32_t> dropped(numbers->dropped.begin(), numbers->dropped.end());
    RC_ASSERT(contents_of(here) == contents_of(saved, dropped));
    if (!dropped.empty()) RC_ASSERT(here.blocks.size() + (saved.null_block == 0 ? 1 : 0) == static_cast<size_t>(count));

    std::map<int32_t, int32_t> is_cached;
    for (const KvBlock& block : saved.blocks) is_cached[block.id] = block.ref_count == 0;
    Numbers stay, order;  // of cached ones, in the order of eviction
    bool first_ones = true;
    for (const int32_t id : saved.free_order) {
      if (is_cached[id] == 0) continue;
      if (!dropped.contains(id)) {
        stay.push_back(numbers->new_number[static_cast<size_t>(id)]);
        first_ones = false;
      } else {
        RC_ASSERT(first_ones);
      }
    }
    std::set<int32_t> cached;
    for (const KvBlock& block : here.blocks) {
      if (block.ref_count == 0) cached.insert(block.id);
    }
    std::copy_if(here.free_order.begin(), here.free_order.end(), std::back_inserter(order),
                 [&](int32_t id) { return cached.contains(id); });
    RC_ASSERT(order == stay);
    // Numbers that the engine has stay; of all others each is given once.
    std::set<int32_t> given;
    for (size_t id = 0; id < numbers->new_number.size(); ++id) {
      if (const int32_t now = numbers->new_number[id]; now >= 0) RC_ASSERT(given.insert(now).second);
    }
    for (const KvBlock& block : saved.blocks) {
      if (block.id < count && !dropped.contains(block.id))
        RC_ASSERT(numbers->new_number[static_cast<size_t>(block.id)] == block.id);
    }
    RC_ASSERT(here.block_numbers.empty() || here.block_numbers == numbers->new_number);
  });
  EXPECT_TRUE(held);
}

}  // namespace
}  // namespace torpor
