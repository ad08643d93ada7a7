// SPDX-License-Identifier: Apache-2.0
#include "kvcache/block_pool.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "base/event_ring.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::value_of;
using enum BlockState;
using enum BlockTrigger;

constexpr int32_t kBlockTokens = 4;

std::vector<int32_t> tokens_of(int32_t seed) { return {seed, seed + 1, seed + 2, seed + 3}; }

// A registered block with these tokens after `parent`.
BlockRef registered(BlockPool& pool, int32_t seed, const Digest& parent = {}, uint64_t salt = 0) {
  MutableBlock block = std::move(value_of(pool.allocate(1))[0]);
  EXPECT_SUCCEEDS(block.initialize(parent, salt));
  EXPECT_EQ(value_of(block.add_tokens(tokens_of(seed))), kBlockTokens);
  EXPECT_SUCCEEDS(block.schedule_compute());
  EXPECT_SUCCEEDS(block.compute_done());
  return value_of(block.register_block());
}

std::unique_ptr<BlockPool> make(int32_t blocks, BlockPoolOptions options = {}) {
  options.num_blocks = blocks;
  options.block_tokens = kBlockTokens;
  return value_of(BlockPool::create(options));
}

// I1. The whole table: what is not listed is refused.
TEST(BlockState, I1EveryTransitionOfTheTableAndNoOther) {
  const std::map<std::pair<BlockState, BlockTrigger>, BlockState> allowed = {
      {{kEmpty, kInitialize}, kPartial},
      {{kPartial, kAddTokens}, kPartial},
      {{kPartial, kAddLastTokens}, kReadyForScheduling},
      {{kReadyForScheduling, kScheduleCompute}, kInflight},
      {{kReadyForScheduling, kCancelSchedule}, kPartial},
      {{kInflight, kComputeDone}, kPartial},
      {{kInflight, kComputeDoneFull}, kComplete},
      {{kComplete, kRegister}, kRegistered},
      {{kEmpty, kReset}, kEmpty},
      {{kPartial, kReset}, kEmpty},
      {{kReadyForScheduling, kReset}, kEmpty},
      {{kComplete, kReset}, kEmpty},
      {{kRegistered, kReset}, kEmpty},
  };
  for (int s = 0; s < kBlockStates; ++s) {
    for (int t = 0; t < kBlockTriggers; ++t) {
      const auto state = static_cast<BlockState>(s);
      const auto trigger = static_cast<BlockTrigger>(t);
      const auto found = allowed.find({state, trigger});
      EXPECT_EQ(next_state(state, trigger), found == allowed.end() ? std::nullopt : std::optional(found->second))
          << name(state) << ", " << name(trigger);
    }
  }
}

TEST(BlockPool, ABlockGoesThroughItsLifeTokenByToken) {
  const auto pool = make(1);
  MutableBlock block = std::move(value_of(pool->allocate(1))[0]);
  EXPECT_EQ(block.state(), kEmpty);
  ASSERT_SUCCEEDS(block.initialize({}, 7));
  EXPECT_EQ(value_of(block.add_tokens(std::vector<int32_t>{1}, /*more_to_come=*/true)), 1);
  EXPECT_EQ(block.state(), kPartial);
  EXPECT_EQ(value_of(block.add_tokens(std::vector<int32_t>{2})), 1);
  EXPECT_EQ(block.state(), kReadyForScheduling);
  ASSERT_SUCCEEDS(block.cancel_schedule());
  EXPECT_EQ(value_of(block.add_tokens(std::vector<int32_t>{3})), 1);
  ASSERT_SUCCEEDS(block.schedule_compute());
  ASSERT_SUCCEEDS(block.compute_done());
  EXPECT_EQ(block.state(), kPartial);                                       // room is left
  EXPECT_EQ(value_of(block.add_tokens(std::vector<int32_t>{4, 5, 6})), 1);  // one fits
  ASSERT_SUCCEEDS(block.schedule_compute());
  ASSERT_SUCCEEDS(block.compute_done());
  EXPECT_EQ(block.state(), kComplete);
  const BlockRef shared = value_of(block.register_block());
  EXPECT_EQ(shared.identity().tokens, (std::vector<int32_t>{1, 2, 3, 4}));
  EXPECT_EQ(shared.identity().salt, 7u);
  EXPECT_SUCCEEDS(pool->check());
}

TEST(BlockPool, AFullBlockThatWasCancelledIsScheduledAgainAsItIs) {
  const auto pool = make(1);
  MutableBlock block = std::move(value_of(pool->allocate(1))[0]);
  ASSERT_SUCCEEDS(block.initialize({}, 7));
  EXPECT_FAILS(block.add_tokens({}), Code::kInvalidArgument, "no tokens");
  EXPECT_EQ(value_of(block.add_tokens(std::vector<int32_t>{1, 2, 3, 4})), 4);
  ASSERT_SUCCEEDS(block.cancel_schedule());
  EXPECT_EQ(value_of(block.add_tokens({})), 0);
  ASSERT_SUCCEEDS(block.schedule_compute());
  ASSERT_SUCCEEDS(block.compute_done());
  EXPECT_EQ(value_of(block.register_block()).identity().tokens, (std::vector<int32_t>{1, 2, 3, 4}));
}

// I1 on the handles: what the table forbids is an error that names block, state and call, and changes nothing.
TEST(BlockPool, I1ACallThatDoesNotFitTheStateIsAnErrorAndChangesNothing) {
  const auto pool = make(1);
  MutableBlock block = std::move(value_of(pool->allocate(1))[0]);
  EXPECT_FAILS(block.add_tokens(tokens_of(1)), Code::kFailedPrecondition, "empty");
  EXPECT_FAILS(block.schedule_compute(), Code::kFailedPrecondition, "schedule compute");
  EXPECT_FAILS(block.cancel_schedule(), Code::kFailedPrecondition);
  EXPECT_FAILS(block.compute_done(), Code::kFailedPrecondition);
  EXPECT_FAILS(block.register_block(), Code::kFailedPrecondition, "register");
  ASSERT_SUCCEEDS(block.initialize({}, 0));
  EXPECT_FAILS(block.initialize({}, 0), Code::kFailedPrecondition);
  EXPECT_FAILS(block.add_tokens({}), Code::kInvalidArgument);
  ASSERT_SUCCEEDS(block.add_tokens(tokens_of(1)));
  EXPECT_FAILS(block.add_tokens(tokens_of(1)), Code::kFailedPrecondition, "ready for scheduling");
  ASSERT_SUCCEEDS(block.schedule_compute());
  EXPECT_FAILS(block.reset(), Code::kFailedPrecondition, "in flight");  // I3: the device may write into it
  EXPECT_FAILS(block.cancel_schedule(), Code::kFailedPrecondition);
  EXPECT_FAILS(block.register_block(), Code::kFailedPrecondition);
  EXPECT_EQ(block.tokens(), kBlockTokens);
  EXPECT_SUCCEEDS(block.compute_done());
}

TEST(BlockPool, AllocationIsAllOrNothing) {
  const auto pool = make(3);
  const auto two = value_of(pool->allocate(2));
  EXPECT_FAILS(pool->allocate(2), Code::kResourceExhausted, "2 blocks wanted, 1 of 3");
  EXPECT_FAILS(pool->allocate(-1), Code::kResourceExhausted);
  EXPECT_EQ(pool->info().free, 1);
  EXPECT_SUCCEEDS(pool->allocate(1));
}

// I3. A block whose owner goes while the device may write into it is never used again.
TEST(BlockPool, I3ABlockThatIsLeftInFlightIsQuarantined) {
  const auto pool = make(2);
  {
    MutableBlock block = std::move(value_of(pool->allocate(1))[0]);
    ASSERT_SUCCEEDS(block.initialize({}, 0));
    ASSERT_SUCCEEDS(block.add_tokens(tokens_of(1)));
    ASSERT_SUCCEEDS(block.schedule_compute());
  }
  EXPECT_EQ(pool->info().quarantined, 1);
  EXPECT_EQ(pool->info().free, 1);
  EXPECT_FAILS(pool->allocate(2), Code::kResourceExhausted);
  EXPECT_SUCCEEDS(pool->check());
}

TEST(BlockPool, ACachedBlockIsFoundUntilItIsEvictedFromTheFront) {
  const auto pool = make(3);
  BlockIdentity first, second;
  {
    const BlockRef a = registered(*pool, 10);
    const BlockRef b = registered(*pool, 20);
    first = a.identity();
    second = b.identity();
  }  // b goes first, then a: b is evicted first
  EXPECT_EQ(pool->info().cached, 2);
  auto taken = value_of(pool->allocate(1));  // the one without content
  EXPECT_EQ(pool->info().evictions, 0u);
  taken.push_back(std::move(value_of(pool->allocate(1))[0]));
  EXPECT_FALSE(pool->contains(second));
  EXPECT_TRUE(pool->contains(first));
  EXPECT_EQ(pool->match(std::vector{first}).size(), 1u);
  EXPECT_EQ(pool->info().evictions, 1u);
  EXPECT_SUCCEEDS(pool->check());
}

TEST(BlockPool, AMatchIsTheLongestRunAndKeepsItsBlocks) {
  const auto pool = make(4);
  std::vector<BlockIdentity> chain;
  Digest parent;
  std::vector<BlockRef> refs;
  for (int i = 0; i < 3; ++i) {
    refs.push_back(registered(*pool, i * 10, parent));
    chain.push_back(refs.back().identity());
    parent = chain.back().hash();
  }
  refs.clear();
  EXPECT_EQ(pool->match(chain).size(), 3u);
  chain[1].tokens[0] = 99;
  EXPECT_EQ(pool->match(chain).size(), 1u);
  chain[1].tokens[0] = 10;
  const auto kept = pool->match(std::span(chain).first(2));
  EXPECT_EQ(pool->info().shared, 2);
  EXPECT_SUCCEEDS(pool->allocate(2));
  EXPECT_FAILS(pool->allocate(3), Code::kResourceExhausted);
  EXPECT_SUCCEEDS(pool->check());
}

TEST(BlockPool, AHitComparesWhatItClaimsNotOnlyTheHash) {
  const auto pool = make(4, {.hash = [](const BlockIdentity&) { return Digest{}; }});  // every hash collides
  const BlockRef a = registered(*pool, 10);
  const BlockRef b = registered(*pool, 20);
  EXPECT_EQ(pool->match(std::vector{b.identity()})[0].id(), b.id());
  BlockIdentity other = a.identity();
  for (const auto change : {0, 1, 2, 3}) {
    BlockIdentity changed = other;
    if (change == 0) changed.parent.bytes[0] = 1;
    if (change == 1) changed.salt = 1;
    if (change == 2) changed.group = 1;
    if (change == 3) changed.tokens.back() = 0;
    EXPECT_TRUE(pool->match(std::vector{changed}).empty()) << change;
    EXPECT_NE(changed.hash(), other.hash()) << change;
  }
}

TEST(BlockPool, TwoBlocksMayCarryOneHashAndEachIsEvictedAlone) {
  const auto pool = make(2);
  const BlockRef a = registered(*pool, 10);
  {
    const BlockRef duplicate = registered(*pool, 10);
    EXPECT_NE(duplicate.id(), a.id());
    EXPECT_EQ(pool->match(std::vector{a.identity()})[0].id(), a.id());  // the oldest
  }
  EXPECT_SUCCEEDS(pool->allocate(1));  // evicts the duplicate
  EXPECT_TRUE(pool->contains(a.identity()));
  EXPECT_SUCCEEDS(pool->check());
}

TEST(WeakBlock, CannotBeUpgradedAfterAnEvictionEvenIfItsSlotHoldsTheSameAgain) {
  const auto pool = make(1);
  WeakBlock weak;
  BlockIdentity identity;
  {
    const BlockRef block = registered(*pool, 10);
    weak = WeakBlock(block);
    identity = block.identity();
  }
  EXPECT_TRUE(weak.upgrade().has_value());
  const BlockRef again = registered(*pool, 10);  // evicts it, then registers the same content in the same slot
  EXPECT_EQ(again.identity(), identity);
  EXPECT_EQ(again.id(), weak.id());
  EXPECT_FALSE(weak.upgrade().has_value());
  EXPECT_FALSE(WeakBlock().upgrade().has_value());
}

TEST(BlockPool, ClearingForgetsWhatNobodyKeeps) {
  const auto pool = make(3);
  const BlockRef kept = registered(*pool, 10);
  const BlockIdentity gone = registered(*pool, 20).identity();
  EXPECT_EQ(pool->clear_cached(), 1);
  EXPECT_TRUE(pool->contains(kept.identity()));
  EXPECT_FALSE(pool->contains(gone));
  EXPECT_SUCCEEDS(pool->check());
}

TEST(BlockPool, EachTransitionIsAnEvent) {
  const auto ring = value_of(EventRing::in_memory({}, 64));
  const auto pool = value_of(
      BlockPool::create({.num_blocks = 1, .block_tokens = kBlockTokens}, EventPort(*ring, system_clock(), true)));
  { const BlockRef block = registered(*pool, 1); }
  ASSERT_SUCCEEDS(pool->allocate(1));
  std::vector<Event> events;
  EventReader(*ring).read(events, true);
  std::string seen;
  for (const Event& event : events) {
    if (event.type == EventType::kBlock) seen += std::string(name(static_cast<BlockState>(event.to))) + ",";
  }
  EXPECT_EQ(seen, "partial,ready for scheduling,in flight,complete,registered,empty,empty,");
}

// What was told says at any time what can be found: nothing but the events is looked at.
TEST(BlockPool, WhatIsToldSaysWhatCanBeFound) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto ring = value_of(EventRing::in_memory({}, 1 << 12));
    const EventPort port(*ring, system_clock());
    auto pool = value_of(BlockPool::create({.num_blocks = 16, .block_tokens = kBlockTokens}, port));
    EventReader reader(*ring);
    std::map<uint64_t, Digest> found;
    std::vector<BlockRef> kept;
    for (int i = 0; i < 200; ++i) {
      const size_t some = kept.empty() ? 0 : random() % kept.size();
      switch (random() % 8) {
        case 0: pool->clear_cached(); break;
        case 1: pool->evict({static_cast<int32_t>(random() % 16), static_cast<int32_t>(random() % 16)}); break;
        case 2:
          if (!kept.empty()) pool->discard(kept[some]);
          break;
        case 3:
          if (!kept.empty()) pool->rename(kept[some], {.tokens = tokens_of(static_cast<int32_t>(random() % 20))});
          break;
        case 4:
          if (!kept.empty()) kept.erase(kept.begin() + static_cast<std::ptrdiff_t>(some));
          break;
        default:
          if (pool->info().free > 0) kept.push_back(registered(*pool, static_cast<int32_t>(random() % 20)));
      }
      if (i == 100) {  // into another pool, with the same port
        kept.clear();
        pool->clear_cached();
        kept.push_back(registered(*pool, 3));
        const BlockPoolSnapshot snapshot = pool->snapshot();
        kept.clear();
        pool->clear_cached();
        pool = value_of(BlockPool::create({.num_blocks = 16, .block_tokens = kBlockTokens}, port));
        BlockPool::Handles handles = value_of(pool->restore(snapshot));
        for (auto& [id, block] : handles.shared) kept.push_back(std::move(block));
      }
      std::vector<Event> events;
      reader.read(events, true);
      for (const Event& event : events) {
        if (event.type == EventType::kRegistered) {
          EXPECT_TRUE(found.emplace(low_of(event.a), event.key).second);
          EXPECT_EQ(high_of(event.a), kBlockTokens);
        } else if (event.type == EventType::kDropped) {
          EXPECT_EQ(found.erase(event.a), 1u);
        }
      }
      std::map<uint64_t, Digest> truth;
      for (const BlockPoolSnapshot::Block& block : pool->snapshot().registered)
        truth[static_cast<uint64_t>(block.id)] = block.identity.hash();
      ASSERT_EQ(found, truth) << i;
      ASSERT_SUCCEEDS(pool->check());  // the counters, too
    }
    EXPECT_EQ(reader.lost(), 0u);
    kept.clear();
  }
}

TEST(BlockPool, BadSizesAreRefused) {
  EXPECT_FAILS(BlockPool::create({.num_blocks = 0}), Code::kInvalidArgument, "num_blocks");
  EXPECT_FAILS(BlockPool::create({.num_blocks = 1, .block_tokens = 0}), Code::kInvalidArgument, "block_tokens");
}

// Random lives of many blocks, on several threads: the books always agree, and a block that somebody holds is never
// another.
TEST(BlockPool, UnderRandomUseByManyThreadsTheBooksAgree) {
  const auto pool = make(64);
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      std::vector<BlockRef> held;
      std::vector<WeakBlock> weak;
      for (int i = 0; i < 2000; ++i) {
        switch (random() % 5) {
          case 0:
          case 1:
            if (held.size() < 10) held.push_back(registered(*pool, static_cast<int32_t>(random() % 100) * 10));
            break;
          case 2:
            if (!held.empty()) {
              weak.push_back(WeakBlock(held.back()));
              held.pop_back();
            }
            break;
          case 3:
            if (!weak.empty()) {
              const auto block = weak[random() % weak.size()].upgrade();
              EXPECT_TRUE(!block || block->identity().tokens.size() == 4u);
            }
            break;
          case 4: {
            const BlockIdentity identity{.tokens = tokens_of(static_cast<int32_t>(random() % 100) * 10)};
            for (const BlockRef& block : pool->match(std::vector{identity})) EXPECT_EQ(block.identity(), identity);
            break;
          }
        }
        if (i % 100 == 0) {
          EXPECT_SUCCEEDS(pool->check());
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_SUCCEEDS(pool->check());
  EXPECT_EQ(pool->info().shared + pool->info().owned, 0);
  EXPECT_EQ(pool->info().free, 64);
}

// A random pool, as values into a new one: the same blocks are found, and the next ones are taken in the same order.
TEST(BlockPool, ASnapshotPutsAnUnusedPoolIntoTheSameState) {
  for (unsigned seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto pool = make(24);
    std::vector<BlockRef> kept;
    for (int i = 0; i < 60; ++i) {
      if (random() % 3 != 0 && pool->info().free > 4)
        kept.push_back(registered(*pool, static_cast<int32_t>(random() % 40)));
      if (random() % 2 == 0 && !kept.empty())
        kept.erase(kept.begin() + static_cast<std::ptrdiff_t>(random() % kept.size()));
    }
    auto filling = value_of(pool->allocate(2));
    const int32_t first = filling[0].id(), second = filling[1].id();

    const auto other = make(24);
    BlockPool::Handles handles = value_of(other->restore(pool->snapshot()));
    ASSERT_SUCCEEDS(other->check());
    EXPECT_EQ(other->free_order(), pool->free_order());
    EXPECT_EQ(handles.owned.size(), 2u);
    EXPECT_TRUE(handles.owned.contains(first) && handles.owned.contains(second));
    for (const BlockRef& block : kept) EXPECT_EQ(handles.shared.at(block.id()).identity(), block.identity());
    for (int32_t token = 0; token < 40; ++token) {
      const BlockIdentity identity{.tokens = tokens_of(token)};
      const auto here = pool->match({&identity, 1});
      const auto there = other->match({&identity, 1});
      ASSERT_EQ(here.size(), there.size());
      if (!here.empty()) {
        EXPECT_EQ(here[0].id(), there[0].id());
      }
    }
    EXPECT_EQ(other->free_order(), pool->free_order());
    EXPECT_FAILS(other->restore(pool->snapshot()), Code::kFailedPrecondition, "in use");
  }
}

// A name from before the restore must not find what it brought.
TEST(BlockPool, ANameFromBeforeARestoreFindsNothing) {
  const auto pool = make(2);
  WeakBlock before;
  {
    const BlockRef block = registered(*pool, 1);
    before = WeakBlock(block);
  }
  EXPECT_EQ(pool->clear_cached(), 1);
  const BlockPoolSnapshot snapshot{.registered = {{before.id(), {.tokens = tokens_of(7)}}}, .free_order = {}};
  const BlockPool::Handles handles = value_of(pool->restore(snapshot));
  EXPECT_EQ(handles.shared.count(before.id()), 1u);
  EXPECT_FALSE(before.upgrade().has_value());
  EXPECT_TRUE(WeakBlock(handles.shared.at(before.id())).upgrade().has_value());
}

TEST(BlockPool, ASnapshotThatContradictsItselfIsRefused) {
  const auto with = [](auto change) {
    const auto pool = make(4);
    registered(*pool, 1);
    BlockPoolSnapshot snapshot = pool->snapshot();
    change(snapshot);
    const auto other = make(4);
    auto restored = other->restore(snapshot);
    EXPECT_EQ(other->info().free, 4);
    return restored;
  };
  EXPECT_FAILS(with([](auto& s) { s.registered[0].id = 4; }), Code::kCorruption, "block 4 of 4");
  EXPECT_FAILS(with([](auto& s) { s.registered[0].id = -1; }), Code::kCorruption, "block -1");
  EXPECT_FAILS(with([](auto& s) { s.registered.push_back(s.registered[0]); }), Code::kCorruption, "twice");
  EXPECT_FAILS(with([](auto& s) { s.registered[0].identity.tokens.push_back(1); }), Code::kCorruption, "5 tokens");
  EXPECT_FAILS(with([](auto& s) { s.free_order.push_back(s.free_order[0]); }), Code::kCorruption, "free twice");
  EXPECT_FAILS(with([](auto& s) { s.free_order[0] = 7; }), Code::kCorruption, "block 7");
  EXPECT_FAILS(with([](auto& s) { std::reverse(s.free_order.begin(), s.free_order.end()); }), Code::kCorruption,
               "behind");
}

}  // namespace
}  // namespace torpor
