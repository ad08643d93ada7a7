// SPDX-License-Identifier: Apache-2.0
#include "engine/rank_memory.h"
#include "engine/tag_sleep.h"

#include <algorithm>
#include <cstring>
#include <future>
#include <utility>

#include <sys/wait.h>
#include <unistd.h>

#include "allocator/host_device.h"
#include "base/units.h"
#include "tests/support/faulty_device.h"
#include "tests/support/rank_call.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::value_of;

class RankMemoryTest : public ::testing::Test {
 protected:
  std::unique_ptr<RankMemory> make(bool keep_backup) {
    auto memory = value_of(RankMemory::create(value_of(make_host_device()), linux_file_system(),
                                              {.threads = 2, .keep_backup = keep_backup}));
    address_ = value_of(memory->allocate("weights", "w", kSize));
    std::memset(reinterpret_cast<void*>(address_), 5, kSize);  // NOLINT(performance-no-int-to-ptr)
    return memory;
  }
  template <class Order>
  static typename Order::Reply call(RankMemory& memory, const Order& order) {
    SCOPED_TRACE(Order::kName);
    return value_of(test::call_rank(memory, order));
  }
  // Returns what was copied, and what was held then.
  static std::pair<uint64_t, RankLedger> sleep_and_wake(RankMemory& memory, const std::string& tag = "weights") {
    const uint64_t copied = call(memory, orders::Save{.tags = {tag}}).bytes;
    RankLedger asleep = call(memory, orders::Detach{.tags = {tag}}).ledger;
    wake(memory, tag);
    return {copied, std::move(asleep)};
  }
  static void wake(RankMemory& memory, const std::string& tag = "weights") {
    call(memory, orders::Restore{.tags = {tag}});
    call(memory, orders::Finish{.tags = {tag}, .keep_backup = true});
  }
  static std::string digest(RankMemory& memory) {
    return call(memory, orders::DigestTags{.tags = {"weights"}}).digests.at("weights");
  }
  static constexpr uint64_t kSize = 10 * kMiB;
  DeviceAddress address_ = 0;
};

TEST_F(RankMemoryTest, AKeptBackupIsNotCopiedAgainUntilTheOwnerMarksItDirty) {
  const auto memory = make(true);
  EXPECT_EQ(sleep_and_wake(*memory).first, kSize);
  EXPECT_EQ(sleep_and_wake(*memory).first, 0u);
  memory->mark_dirty("weights");
  EXPECT_EQ(sleep_and_wake(*memory).first, kSize);
}

TEST_F(RankMemoryTest, AKeptBackupGoesWithASleepThatDropsTheContent) {
  const auto memory = make(true);
  sleep_and_wake(*memory);
  ASSERT_TRUE(memory->ledger().tags.contains("weights"));
  const RankLedger asleep = call(*memory, orders::Detach{.tags = {"weights"}}).ledger;
  EXPECT_EQ(asleep.tags.at("weights").backup_host_bytes, 0u);
  EXPECT_EQ(call(*memory, orders::Restore{.tags = {"weights"}}).without_content, std::vector<std::string>{"weights"});
  call(*memory, orders::Finish{.tags = {"weights"}, .keep_backup = true});
  EXPECT_EQ(*reinterpret_cast<const char*>(address_), 0);  // NOLINT(performance-no-int-to-ptr)
}

TEST_F(RankMemoryTest, AKeptBackupThatASleepWouldHaveReusedStaysWhenItIsUndone) {
  const auto memory = make(true);
  sleep_and_wake(*memory);
  EXPECT_EQ(call(*memory, orders::Save{.tags = {"weights"}}).reused_bytes, kSize);
  call(*memory, orders::Undo{.what = orders::Undo::What::kSave, .tags = {"weights"}});
  EXPECT_EQ(sleep_and_wake(*memory).first, 0u);
  call(*memory, orders::Save{.tags = {"weights"}});
  call(*memory, orders::Undo{.what = orders::Undo::What::kSave, .tags = {"weights"}});
  const RankLedger asleep = call(*memory, orders::Detach{.tags = {"weights"}}).ledger;
  EXPECT_EQ(asleep.tags.at("weights").backup_host_bytes, 0u);
}

// Two processes: the same weights in other places, with other bytes beside them.
TEST_F(RankMemoryTest, TheDigestOfNamedWeightsIsOfTheirBytesAlone) {
  const auto here = make(false);
  const DeviceAddress first = address_;
  const auto there = value_of(RankMemory::create(value_of(make_host_device()), linux_file_system(), {.threads = 1}));
  ASSERT_SUCCEEDS(there->allocate("weights", "other", kSize));
  const DeviceAddress second = value_of(there->allocate("weights", "another name", kSize));
  std::memset(reinterpret_cast<void*>(second), 6, kSize);            // NOLINT(performance-no-int-to-ptr)
  std::memset(reinterpret_cast<void*>(second + kMiB), 5, 6 * kMiB);  // NOLINT(performance-no-int-to-ptr)
  const auto named = [](RankMemory& memory, bool as_proven) {
    return call(memory, orders::DigestTags{.tags = {"weights"}, .as_proven = as_proven, .named = true}).digests;
  };
  EXPECT_TRUE(named(*here, false).empty());
  ASSERT_SUCCEEDS(here->name_weights("two", {{first, 5 * kMiB}, {first + 8 * kMiB, kMiB}}));
  ASSERT_SUCCEEDS(there->name_weights("two", {{second + kMiB, 5 * kMiB}, {second + 6 * kMiB, kMiB}}));
  const std::string digest = named(*here, false).at("weights");
  EXPECT_EQ(named(*there, false).at("weights"), digest);
  EXPECT_EQ(value_of(there->weights_digest()), digest);
  EXPECT_NE(RankMemoryTest::digest(*there), RankMemoryTest::digest(*here));
  // Bytes beside them do not count; theirs do, once they are known to be written.
  *reinterpret_cast<char*>(second) = 1;  // NOLINT(performance-no-int-to-ptr)
  EXPECT_EQ(named(*there, true).at("weights"), digest);
  *reinterpret_cast<char*>(second + 3 * kMiB + 100) = 1;  // NOLINT(performance-no-int-to-ptr)
  there->invalidate_digest("weights");
  EXPECT_NE(named(*there, true).at("weights"), digest);
  // Of another kind they are others.
  ASSERT_SUCCEEDS(here->name_weights("of another type", {{first, 5 * kMiB}, {first + 8 * kMiB, kMiB}}));
  EXPECT_NE(named(*here, true).at("weights"), digest);
  EXPECT_FAILS(here->name_weights("two", {{first + kSize - 1, 2}}), Code::kInvalidArgument);
}

// Nobody wrote them, and their bytes are others.
TEST_F(RankMemoryTest, TheDigestOfNamedWeightsThatCameBackWithoutContentIsAnother) {
  const auto memory = make(false);
  ASSERT_SUCCEEDS(memory->name_weights("all", {{address_, kSize}}));
  const auto named = [&] {
    return call(*memory, orders::DigestTags{.tags = {"weights"}, .as_proven = true, .named = true})
        .digests.at("weights");
  };
  const std::string before = named();
  call(*memory, orders::Detach{.tags = {"weights"}});
  wake(*memory);
  EXPECT_NE(named(), before);
  std::memset(reinterpret_cast<void*>(address_), 5, kSize);  // NOLINT(performance-no-int-to-ptr)
  memory->mark_dirty("weights");
  EXPECT_EQ(named(), before);
}

TEST_F(RankMemoryTest, WithoutAKeptBackupNoHostMemoryIsHeldWhileAwake) {
  const auto memory = make(false);
  EXPECT_EQ(sleep_and_wake(*memory).first, kSize);
  EXPECT_EQ(memory->ledger().arena_held_bytes, 0u);
  EXPECT_EQ(sleep_and_wake(*memory).first, kSize);
}

TEST_F(RankMemoryTest, TheArenaKeepsForTheNextSleepWhatItMay) {
  for (const uint64_t keep : {uint64_t{0}, 8 * kMiB, uint64_t{UINT64_MAX}}) {
    const auto memory =
        value_of(RankMemory::create(value_of(make_host_device()), linux_file_system(),
                                    {.arena_slab_bytes = 4 * kMiB, .arena_keep_bytes = keep, .threads = 1}));
    ASSERT_SUCCEEDS(memory->allocate("weights", "w", kSize));
    uint64_t held = 0;
    for (int cycle = 0; cycle < 3; ++cycle) {
      EXPECT_GE(sleep_and_wake(*memory).second.arena_held_bytes, kSize);
      held = memory->ledger().arena_held_bytes;
      EXPECT_LE(held, keep);
    }
    if (keep > kSize) {
      EXPECT_GE(held, kSize);  // less than a backup's piece may be too little for any
    }
  }
}

// Host memory of one tag is counted before the next asks for more: then its rest is one piece, and large enough.
TEST_F(RankMemoryTest, ASleepThatJustFitsItsBudgetFits) {
  constexpr uint64_t kBlock = 24 * kKiB;
  constexpr uint32_t kBlocks = 20;
  const auto memory = value_of(RankMemory::create(value_of(make_host_device()), linux_file_system(),
                                                  {.arena_budget_bytes = 1044 * kKiB,
                                                   .arena_slab_bytes = 64 * kKiB,
                                                   .threads = 1,
                                                   .own_threads = false,
                                                   .keep_backup = false,
                                                   .retain_kv_bytes = 0}));
  ASSERT_SUCCEEDS(memory->allocate("weights", "w", kBlocks * kBlock));
  const DeviceAddress kv = value_of(memory->allocate("kv_cache", "kv", kBlocks * kBlock));
  ASSERT_SUCCEEDS(memory->set_kv_layout("kv_cache", {.num_blocks = kBlocks,
                                                     .tensors = {{.address = kv,
                                                                  .layers = 1,
                                                                  .layer_stride = kBlocks * kBlock,
                                                                  .block_stride = kBlock,
                                                                  .block_bytes = kBlock}}}));
  orders::Save order{.tags = {"weights", "kv_cache"}};
  for (uint32_t block = 0; block < kBlocks; ++block) order.blocks.push_back(static_cast<int32_t>(block));
  EXPECT_EQ(call(*memory, order).bytes, 2 * kBlocks * kBlock);
}

// Memory of a device of its own; what is wanted of the machine for its first sleep.
class FirstSleep : public RankMemoryTest {
 protected:
  static std::unique_ptr<RankMemory> make(RankMemoryOptions options, bool own_memory = true) {
    auto device = std::make_unique<test::FaultyDevice>(value_of(make_host_device()));
    if (own_memory) device->has_own_memory();
    options.threads = 1;
    if (!options.prefault_headroom) options.prefault_headroom = [] { return kGiB; };
    auto memory = value_of(RankMemory::create(std::move(device), linux_file_system(), std::move(options)));
    for (const char* name : {"a", "b"}) EXPECT_SUCCEEDS(memory->allocate("weights", name, kSize));
    EXPECT_SUCCEEDS(memory->allocate("kv_cache", "kv", kKv));
    memory->wait_background_prefault();
    (void)memory->arena().wait_prefault();
    return memory;
  }
  static uint64_t held(RankMemory& memory) { return memory.ledger().arena_held_bytes; }
  static constexpr uint64_t kKv = 60 * kMiB;
};

TEST_F(FirstSleep, FindsItsHostMemoryThere) {
  const auto memory = make({.arena_slab_bytes = 16 * kMiB, .arena_prefault_bytes = {}});
  const uint64_t before = held(*memory);
  EXPECT_GE(before, 2 * 2 * kSize);  // of the KV cache as much as of the weights
  EXPECT_LE(before, 2 * 2 * kSize + 16 * kMiB);
  EXPECT_EQ(sleep_and_wake(*memory).second.arena_held_bytes, before);
  EXPECT_EQ(held(*memory), before);
  ASSERT_SUCCEEDS(memory->allocate("weights", "more", kSize));  // after a sleep it waits for the next
  memory->wait_background_prefault();
  EXPECT_EQ(held(*memory), before);
}

TEST_F(FirstSleep, TakesWhatItSaysOrNothing) {
  EXPECT_EQ(held(*make({.arena_prefault_bytes = 0})), 0u);
  EXPECT_EQ(held(*make({.arena_prefault_bytes = {}}, /*own_memory=*/false)), 0u);  // all is the same memory
  EXPECT_EQ(held(*make({.arena_slab_bytes = 2 * kMiB, .arena_prefault_bytes = 6 * kMiB})), 6 * kMiB);
  EXPECT_EQ(held(*make({.arena_prefault_bytes = {}, .prefault_headroom = [] { return uint64_t{0}; }})), 0u);
}

TEST_F(FirstSleep, IsRefusedAndPlannedSoIfTheMachineHasNoMemory) {
  uint64_t free = kSize;
  const auto memory = make({.free_memory = [&] { return free; }});
  TagSleep tags(*memory);
  EXPECT_NE(value_of(tags.plan_sleep({}, {"weights"})).obstacle.find("are free on this machine"), std::string::npos);
  EXPECT_FAILS(tags.sleep({}, {"weights"}), Code::kResourceExhausted, "are free on this machine");
  EXPECT_EQ(held(*memory), 0u);
  free = 3 * kSize;
  EXPECT_EQ(value_of(tags.plan_sleep({}, {"weights"})).obstacle, "");
  ASSERT_SUCCEEDS(tags.sleep({}, {"weights"}));
  ASSERT_SUCCEEDS(tags.wake({}));
  free = 0;  // all that the next sleep needs is held
  EXPECT_EQ(value_of(tags.plan_sleep({}, {"weights"})).obstacle, "");
  ASSERT_SUCCEEDS(tags.sleep({}, {"weights"}));
}

// The sleep gives an image that it replaces back before it takes memory for the new one. Backups of other tags than the
// weights are never trusted.
TEST_F(FirstSleep, TakesThePlaceOfAKeptBackupAndIsPlannedSo) {
  for (const bool bounded : {false, true}) {
    uint64_t free = 3 * kSize;
    const auto memory = make({.arena_budget_bytes = bounded ? 2 * kSize : 0,
                              .arena_slab_bytes = kMiB,
                              .free_memory = [&] { return free; },
                              .arena_prefault_bytes = 0,
                              .keep_backup = true});
    ASSERT_SUCCEEDS(memory->allocate("rest", "c", kSize));
    TagSleep tags(*memory);
    for (int again = 0; again < 3; ++again) {
      EXPECT_EQ(value_of(tags.plan_sleep({"rest"}, {"rest"})).obstacle, "");
      EXPECT_EQ(value_of(tags.sleep({"rest"}, {"rest"})).copied_bytes, kSize);
      ASSERT_SUCCEEDS(tags.wake({}));
      if (!bounded) free = 0;
    }
    // More than the backup that goes with it.
    ASSERT_SUCCEEDS(memory->allocate("rest", "d", 2 * kSize));
    const std::string obstacle = value_of(tags.plan_sleep({"rest"}, {"rest"})).obstacle;
    EXPECT_NE(obstacle.find(bounded ? "of the budget" : "are free"), std::string::npos) << obstacle;
  }
}

// As for an engine that captures CUDA graphs first.
TEST_F(FirstSleep, WaitsWithItsHostMemoryUntilItIsToldToBegin) {
  for (const std::optional<uint64_t> prefault : {std::optional<uint64_t>(), std::optional(6 * kMiB)}) {
    const auto memory = make({.arena_slab_bytes = 2 * kMiB, .arena_prefault_bytes = prefault, .prefault_waits = true});
    EXPECT_EQ(held(*memory), 0u);
    memory->start_prefault();
    memory->start_prefault();  // nothing more
    memory->wait_background_prefault();
    (void)memory->arena().wait_prefault();
    EXPECT_GE(held(*memory), prefault.value_or(2 * 2 * kSize));
    EXPECT_LE(held(*memory), prefault.value_or(2 * 2 * kSize) + 2 * kMiB);
  }
}

TEST_F(FirstSleep, OfAnEngineInMemoryOfItsProgramWaitsTooAndTakesWhatItsOptionsSay) {
  for (const std::optional<uint64_t> prefault : {std::optional<uint64_t>(), std::optional(6 * kMiB)}) {
    const auto memory = make({.arena_slab_bytes = 2 * kMiB, .arena_prefault_bytes = 0});
    ASSERT_SUCCEEDS(memory->apply({.arena_prefault_bytes = prefault}));
    memory->wait_background_prefault();
    EXPECT_EQ(held(*memory), 0u);
    memory->start_prefault();
    memory->wait_background_prefault();
    (void)memory->arena().wait_prefault();
    EXPECT_GE(held(*memory), prefault.value_or(2 * 2 * kSize));
    EXPECT_LE(held(*memory), prefault.value_or(2 * 2 * kSize) + 2 * kMiB);
  }
}

// As at the end of a process, when no thread may call the driver any more.
TEST_F(FirstSleep, BringsUpNothingMoreOnceItIsEnded) {
  for (const std::optional<uint64_t> prefault : {std::optional<uint64_t>(), std::optional(8 * kGiB)}) {
    auto device = std::make_unique<test::FaultyDevice>(value_of(make_host_device()));
    device->has_own_memory();
    RankMemoryOptions options{.arena_slab_bytes = 2 * kMiB, .arena_prefault_bytes = prefault, .threads = 1};
    options.prefault_headroom = [] { return 16 * kGiB; };
    const auto memory = value_of(RankMemory::create(std::move(device), linux_file_system(), std::move(options)));
    ASSERT_SUCCEEDS(memory->allocate("kv_cache", "kv", kGiB));  // hours of work at its slow pace
    memory->end_prefault();
    const uint64_t came = held(*memory);
    EXPECT_LT(came, kGiB);
    memory->wait_background_prefault();
    (void)memory->arena().wait_prefault();
    ASSERT_SUCCEEDS(memory->allocate("weights", "more", kSize));
    memory->start_prefault();
    memory->wait_background_prefault();
    EXPECT_EQ(held(*memory), came);
    EXPECT_EQ(sleep_and_wake(*memory).first, kSize);  // what a sleep needs comes all the same
  }
}

TEST_F(RankMemoryTest, TheLedgerNamesEveryByte) {
  const auto memory = make(false);
  EXPECT_EQ(memory->ledger().device_physical_bytes, kSize);
  call(*memory, orders::Save{.tags = {"weights"}});
  const orders::Detach::Reply asleep = call(*memory, orders::Detach{.tags = {"weights"}});
  EXPECT_EQ(asleep.bytes, kSize);
  EXPECT_EQ(asleep.ledger.device_physical_bytes, 0u);
  EXPECT_EQ(asleep.ledger.tags.at("weights").state, "detached");
  EXPECT_EQ(asleep.ledger.tags.at("weights").physical_bytes, 0u);
  EXPECT_EQ(asleep.ledger.tags.at("weights").backup_host_bytes, kSize);
  EXPECT_GE(asleep.ledger.arena_used_bytes, kSize);
  EXPECT_GE(asleep.ledger.process_resident_bytes, asleep.ledger.arena_used_bytes);
}

TEST_F(RankMemoryTest, DigestsAreThoseOfTheContentAlsoWhileAsleep) {
  const auto memory = make(false);
  const std::string awake = digest(*memory);
  call(*memory, orders::Save{.tags = {"weights"}});
  call(*memory, orders::Detach{.tags = {"weights"}});
  EXPECT_EQ(digest(*memory), awake);
  wake(*memory);
  EXPECT_EQ(digest(*memory), awake);
  *reinterpret_cast<std::byte*>(address_) = std::byte{6};  // NOLINT(performance-no-int-to-ptr)
  EXPECT_NE(digest(*memory), awake);
}

TEST_F(RankMemoryTest, ALayoutThatReachesOutsideItsRegionsIsRefused) {
  const auto memory = make(false);
  const DeviceAddress kv = value_of(memory->allocate("kv_cache", "kv", 1000));
  const auto layout = [&](uint64_t address, uint64_t block_bytes) {
    return KvLayout{.num_blocks = 10,
                    .tensors = {{.address = address,
                                 .layers = 1,
                                 .layer_stride = 1,
                                 .block_stride = block_bytes,
                                 .block_bytes = block_bytes}}};
  };
  EXPECT_SUCCEEDS(memory->set_kv_layout("kv_cache", layout(kv, 100)));
  EXPECT_FAILS(memory->set_kv_layout("kv_cache", layout(kv, 101)), Code::kInvalidArgument, "outside");
  EXPECT_FAILS(memory->set_kv_layout("kv_cache", layout(address_, 100)), Code::kInvalidArgument, "outside");
  // The first and the last block lie in regions of the tag, what is between them does not.
  ASSERT_SUCCEEDS(memory->allocate("weights", "between", kMiB));
  const DeviceAddress other = value_of(memory->allocate("kv_cache", "other", 100'000));
  KvLayout apart = layout(std::min(kv, other), 3);
  apart.num_blocks = 3;
  apart.tensors[0].block_stride = (std::max(kv, other) - std::min(kv, other)) / 2;
  ASSERT_GT(apart.tensors[0].block_stride, 100'000u);  // the block in the middle is in neither
  EXPECT_FAILS(memory->set_kv_layout("kv_cache", apart), Code::kInvalidArgument, "outside");
}

// A block of any group is saved with all its bytes, and those that groups share are moved once.
TEST_F(RankMemoryTest, BlocksOfGroupsThatLieOverOneAnotherAreSavedOnce) {
  const auto memory = make(false);
  const DeviceAddress kv = value_of(memory->allocate("kv_cache", "kv", 3000));
  auto* bytes = reinterpret_cast<std::byte*>(kv);  // NOLINT(performance-no-int-to-ptr)
  for (int i = 0; i < 3000; ++i) bytes[i] = static_cast<std::byte>(i % 251);
  const KvTensor attention{.address = kv, .layers = 2, .layer_stride = 1000, .block_stride = 100, .block_bytes = 100};
  const KvTensor states{.address = kv, .layers = 3, .layer_stride = 1000, .block_stride = 100, .block_bytes = 70};
  ASSERT_SUCCEEDS(memory->set_kv_layout("kv_cache", {.num_blocks = 10, .tensors = {attention, states}}));
  EXPECT_EQ(memory->kv_layout().bytes_per_block(), 270u);
  EXPECT_EQ(call(*memory, orders::Save{.tags = {"kv_cache"}, .blocks = {3, 7}}).bytes, 2 * 270u);
  call(*memory, orders::Detach{.tags = {"kv_cache"}});
  wake(*memory, "kv_cache");
  for (int i = 0; i < 3000; ++i) {
    const int layer = i / 1000, block = i % 1000 / 100, within = i % 100;
    const bool saved = (block == 3 || block == 7) && (layer < 2 || within < 70);
    EXPECT_EQ(bytes[i], saved ? static_cast<std::byte>(i % 251) : std::byte{0}) << i;
  }
}

// Where the device fails at all from some call on, what was begun cannot be undone for every tag: but each is attached,
// detached or broken, and those that are not broken go on.
TEST_F(RankMemoryTest, NoTagStaysOnTheWayWhereverTheDeviceFailsDuringASleep) {
  const std::vector<std::string> tags{"a", "b", "c"};
  int broken = 0;
  int attached_beside_broken = 0;
  for (const bool sticky : {false, true}) {
    for (uint64_t n = 1;; ++n) {
      SCOPED_TRACE(testing::Message() << "call " << n << (sticky ? " and all after" : ""));
      auto owned = std::make_unique<test::FaultyDevice>(value_of(make_host_device()));
      test::FaultyDevice& device = *owned;
      const auto memory =
          value_of(RankMemory::create(std::move(owned), linux_file_system(), {.arena_slab_bytes = kMiB, .threads = 1}));
      std::map<std::string, std::byte*> content;
      for (const std::string& tag : tags) {
        content[tag] = reinterpret_cast<std::byte*>(value_of(memory->allocate(tag, "x", 4096)));
        std::memset(content[tag], tag[0], 4096);
      }
      device.fail_at(n, sticky);
      const Result<TagMove> slept = TagSleep(*memory).sleep({}, tags);
      const bool fired = device.fired();
      device.fail_at(0);
      const std::map<std::string, RegionState> states = memory->states();
      const bool any_broken =
          std::any_of(states.begin(), states.end(), [](const auto& tag) { return tag.second == RegionState::kBroken; });
      if (!slept) {
        EXPECT_EQ(slept.error().state_changed, any_broken);
      }
      for (const std::string& tag : tags) {
        SCOPED_TRACE(tag);
        const RegionState state = states.at(tag);
        if (state == RegionState::kBroken) {
          ++broken;
          continue;
        }
        ASSERT_TRUE(state == RegionState::kAttached || state == RegionState::kDetached) << name(state);
        if (state == RegionState::kAttached) {
          attached_beside_broken += any_broken ? 1 : 0;
          ASSERT_SUCCEEDS(TagSleep(*memory).sleep({tag}, {tag}));
        }
        ASSERT_SUCCEEDS(TagSleep(*memory).wake({tag}));
        for (size_t at = 0; at < 4096; ++at) ASSERT_EQ(content[tag][at], static_cast<std::byte>(tag[0])) << at;
      }
      if (!fired) break;
    }
  }
  EXPECT_GT(broken, 0);
  EXPECT_GT(attached_beside_broken, 0);
}

TEST_F(RankMemoryTest, AChildThatIsForkedDuringASaveWaitsForNoLock) {
  auto owned = std::make_unique<test::FaultyDevice>(value_of(make_host_device()));
  std::promise<void> copies;
  std::promise<void> go_on;
  owned->on_copy([&, copied = false]() mutable {
    if (std::exchange(copied, true)) return;
    copies.set_value();
    go_on.get_future().wait();
  });
  const auto memory = value_of(RankMemory::create(std::move(owned), linux_file_system(), {.threads = 1}));
  ASSERT_TRUE(memory->allocate("weights", "w", kSize));
  auto saving = std::async(std::launch::async, [&] { return TagSleep(*memory).sleep({}, {"weights"}); });
  copies.get_future().wait();
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    memory->set_foreign("weights", true);
    ::_exit(!memory->proven_digest("weights") && memory->ledger().tags.empty() ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);  // not that of SIGALRM
  go_on.set_value();
  EXPECT_SUCCEEDS(saving.get());
}

TEST_F(RankMemoryTest, AKeptBackupGoesAlsoIfTheDeviceKeepsMemoryOfAnotherTag) {
  int gone = 0;
  for (uint64_t n = 1;; ++n) {
    SCOPED_TRACE(n);
    auto owned = std::make_unique<test::FaultyDevice>(value_of(make_host_device()));
    test::FaultyDevice& device = *owned;
    const auto memory =
        value_of(RankMemory::create(std::move(owned), linux_file_system(), {.threads = 1, .keep_backup = true}));
    for (const char* tag : {"a", "b"}) {
      auto* const content = reinterpret_cast<char*>(value_of(memory->allocate(tag, "x", 4096)));  // NOLINT
      std::memset(content, 5, 4096);
    }
    ASSERT_SUCCEEDS(TagSleep(*memory).sleep({}, {"a", "b"}));
    ASSERT_SUCCEEDS(TagSleep(*memory).wake({}));
    device.fail_at(n, true);
    const Result<TagMove> slept = TagSleep(*memory).sleep({}, {"b"});
    const bool fired = device.fired();
    device.fail_at(0);
    if (!slept && memory->states().at("a") == RegionState::kDetached) {  // and "b", which goes last, is broken
      ++gone;
      EXPECT_EQ(value_of(TagSleep(*memory).wake({"a"})).copied_bytes, 0u);
    }
    if (!fired) break;
  }
  EXPECT_GT(gone, 0);
}

TEST_F(RankMemoryTest, HostileAndUnknownOrdersAreErrorsInTheReply) {
  const auto memory = make(false);
  const auto answer_to = [&](const Bytes& order) {
    return decode_reply<orders::Save>(RankService(*memory).call(order));
  };
  for (const uint8_t number : {uint8_t{std::variant_size_v<RankOrder>}, uint8_t{255}}) {
    EXPECT_EQ(order_name({number}), "unknown");
    EXPECT_FAILS(answer_to({number, 0, 0}), Code::kIncompatible, "does not know the order");
  }
  const Bytes save = encode_order(orders::Save{.tags = {"weights"}});
  EXPECT_EQ(order_name(save), "save");
  Bytes longer = save;
  longer.push_back(0);
  Bytes noise(1000, 0xff);
  noise[0] = save[0];
  for (const Bytes& order : {Bytes{}, Bytes(save.begin(), save.end() - 1), longer, noise}) {
    const Result<orders::Save::Reply> answer = answer_to(order);
    EXPECT_FAILS(answer, Code::kCorruption, "an order to a rank");
    EXPECT_NE(answer.error().next_step.find("same version"), std::string::npos);
  }
  EXPECT_EQ(memory->states().at("weights"), RegionState::kAttached);
  ASSERT_SUCCEEDS(
      memory->set_kv_layout("kv_cache", {.num_blocks = 10,
                                         .tensors = {{.address = value_of(memory->allocate("kv_cache", "kv", 1000)),
                                                      .layers = 1,
                                                      .layer_stride = 1,
                                                      .block_stride = 100,
                                                      .block_bytes = 100}}}));
  for (const int32_t block : {-1, 10, INT32_MAX}) {
    EXPECT_FAILS(test::call_rank(*memory, orders::Save{.tags = {"kv_cache"}, .blocks = {block}}), Code::kIncompatible,
                 std::to_string(block));
  }
}

}  // namespace
}  // namespace torpor
