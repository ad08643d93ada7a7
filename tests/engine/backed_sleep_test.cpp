// SPDX-License-Identifier: Apache-2.0
// A sleep to host of an engine that offloads: what its host store has of live blocks is not copied again. S1, S3, S10.
#include "allocator/host_device.h"
#include "base/units.h"
#include "engine/reference/reference_engine.h"
#include "engine/sleep_controller.h"
#include "offload/host_store.h"
#include "tests/support/bf16_bytes.h"
#include "tests/support/faulty_device.h"
#include "tests/support/rank_call.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor {
namespace {

using namespace test;
using namespace reference;

// --- one rank ---

// Return the order that plans this one.
orders::Save planned(orders::Save order) {
  order.stage = orders::Save::Stage::kPlan;
  return order;
}

// One region of blocks, one behind the other; its address.
DeviceAddress allocate_blocks(RankMemory& memory, uint32_t blocks, uint64_t block_bytes) {
  const DeviceAddress kv = value_of(memory.allocate("kv_cache", "kv", blocks * block_bytes));
  const KvTensor tensor{
      .address = kv, .layers = 1, .layer_stride = 1, .block_stride = block_bytes, .block_bytes = block_bytes};
  EXPECT_SUCCEEDS(memory.set_kv_layout("kv_cache", {.num_blocks = blocks, .tensors = {tensor}}));
  return kv;
}
// From when it is saved to when it is back.
void detach_and_wake(RankMemory& memory) {
  value_of(call_rank(memory, orders::Detach{.tags = {"kv_cache"}}));
  value_of(call_rank(memory, orders::Restore{.tags = {"kv_cache"}}));
  value_of(call_rank(memory, orders::Finish{.tags = {"kv_cache"}}));
}

class BorrowedKv : public ::testing::Test {
 protected:
  static constexpr uint64_t kBytes = 6000;  // of a block

  BorrowedKv() {
    memory_ = value_of(RankMemory::create(value_of(make_host_device()), linux_file_system(),
                                          {.arena_slab_bytes = 64 * kKiB, .threads = 1, .retain_kv_bytes = kMiB}));
    kv_ = allocate_blocks(*memory_, 8, kBytes);
    store_ = value_of(memory_->make_host_store({.slots = 4, .slot_bytes = kBytes}));
  }
  std::byte* block(int32_t number) {
    return reinterpret_cast<std::byte*>(kv_ + static_cast<uint64_t>(number) * kBytes);  // NOLINT
  }
  void write(int32_t number, int value) { std::memset(block(number), value, kBytes); }
  bool holds(int32_t number, int value) {
    return std::all_of(block(number), block(number) + kBytes,
                       [&](std::byte byte) { return byte == static_cast<std::byte>(value); });
  }
  std::span<std::byte> place(Slot slot, uint64_t bytes = kBytes) {
    SavedChunk chunk{.bytes = bytes, .offset = static_cast<uint64_t>(slot)};
    return value_of(store_->place(chunk));
  }
  void store(Slot slot, int value) {
    const std::span<std::byte> memory = place(slot);
    std::memset(memory.data(), value, kBytes);
    EXPECT_SUCCEEDS(store_->placed(slot, digest_of(memory)));
  }
  template <class Order>
  typename Order::Reply call(const Order& order) {
    SCOPED_TRACE(Order::kName);
    return value_of(call_rank(*memory_, order));
  }
  static orders::Save saving(std::vector<int32_t> blocks, std::vector<int32_t> host_slots) {
    orders::Save order{.tags = {"kv_cache"}, .blocks = std::move(blocks), .steps = 9};
    for (const int32_t block : order.blocks) order.versions.push_back(static_cast<uint64_t>(block) + 1);
    order.host_slots = std::move(host_slots);
    return order;
  }
  // Blocks copied and not.
  using Moved = std::pair<uint64_t, uint64_t>;
  Moved save(const orders::Save& order) {
    const orders::Save::Reply plan = call(planned(order));
    const orders::Save::Reply reply = call(order);
    EXPECT_EQ(plan.copied_bytes.at("kv_cache"), reply.bytes);
    EXPECT_EQ(plan.reused_bytes, reply.reused_bytes);
    return {reply.bytes / kBytes, reply.reused_bytes / kBytes};
  }
  void detach() { call(orders::Detach{.tags = {"kv_cache"}}); }
  void wake() {
    call(orders::Restore{.tags = {"kv_cache"}});
    call(orders::Finish{.tags = {"kv_cache"}, .keep_backup = true});
  }

  std::unique_ptr<RankMemory> memory_;
  DeviceAddress kv_ = 0;
  std::shared_ptr<HostStore> store_;
};

TEST_F(BorrowedKv, WhatTheStoreHasIsNotCopiedAndComesBackFromThere) {
  write(1, 11), write(2, 12), write(3, 13);
  store(0, 11), store(2, 13);
  EXPECT_EQ(save(saving({1, 2, 3}, {0, -1, 2})), Moved(1, 2));
  detach();
  EXPECT_EQ(memory_->ledger().tags.at("kv_cache").backup_host_bytes, 3 * kBytes);
  EXPECT_EQ(memory_->ledger().tags.at("kv_cache").reused_bytes, 2 * kBytes);
  wake();
  EXPECT_TRUE(holds(1, 11) && holds(2, 12) && holds(3, 13));
  // What was copied is retained; what the store has is the store's.
  EXPECT_EQ(memory_->ledger().tags.at("kv_cache").backup_host_bytes, kBytes);
  EXPECT_EQ(save(saving({1, 2, 3}, {0, -1, 2})), Moved(0, 3));
  detach();
  wake();
  EXPECT_TRUE(holds(1, 11) && holds(2, 12) && holds(3, 13));
}

TEST_F(BorrowedKv, ASlotThatHasNothingOrSomethingElseIsNotBelieved) {
  write(1, 11), write(2, 12), write(3, 13);
  (void)place(0);              // not proven
  (void)place(1, kBytes / 2);  // another size
  EXPECT_SUCCEEDS(store_->placed(1, {}));
  EXPECT_EQ(save(saving({1, 2, 3}, {0, 1, 77})), Moved(3, 0));
  detach();
  wake();
  EXPECT_TRUE(holds(1, 11) && holds(2, 12) && holds(3, 13));
  EXPECT_FAILS(call_rank(*memory_, saving({1, 2}, {0})), Code::kCorruption, "host slot");
}

// Packed blocks are lent to a sleep that packs, as they lie there; another one copies its own.
TEST(BorrowedPackedKv, IsLentToASleepThatPacksAndNoOther) {
  constexpr uint64_t kBytes = 64 * kKiB;
  for (const Codec of_sleep : {Codec::kBf16, Codec::kNone}) {
    SCOPED_TRACE(name(of_sleep));
    const auto memory = value_of(RankMemory::create(value_of(make_host_device()), linux_file_system(),
                                                    {.threads = 1, .host_compression = of_sleep}));
    const DeviceAddress kv = allocate_blocks(*memory, 2, kBytes);
    const std::span<std::byte> blocks(reinterpret_cast<std::byte*>(kv), 2 * kBytes);  // NOLINT
    std::vector<std::byte> before = bf16_values(1, kBytes);
    const std::vector<std::byte> large = noise(2, kBytes);
    before.insert(before.end(), large.begin(), large.end());
    std::copy(before.begin(), before.end(), blocks.begin());
    const std::shared_ptr<HostStore> store =
        value_of(memory->make_host_store({.slots = 4, .slot_bytes = kBytes, .codec = Codec::kBf16}));
    for (const auto& [slot, bytes] : {std::pair(3u, blocks.first(kBytes)), std::pair(0u, blocks.last(kBytes))}) {
      SavedChunk chunk{.digest = digest_of(bytes), .offset = slot};
      RecordPart part{.chunk = &chunk, .bytes = bytes};
      store->put({&part, 1});
      ASSERT_SUCCEEDS(part.status);
    }

    const orders::Save order{
        .tags = {"kv_cache"}, .blocks = {0, 1}, .versions = {1, 2}, .steps = 9, .host_slots = {3, 0}};
    const uint64_t reused = of_sleep == Codec::kBf16 ? 2 * kBytes : kBytes;  // what lies there as it is, in any case
    EXPECT_EQ(value_of(call_rank(*memory, planned(order))).reused_bytes, reused);
    EXPECT_EQ(value_of(call_rank(*memory, order)).reused_bytes, reused);
    detach_and_wake(*memory);
    EXPECT_TRUE(std::equal(before.begin(), before.end(), blocks.begin()));
  }
}

// What it needs to copy is set aside when it is made, and again after each sleep.
TEST(PackedStoreOfARank, ServesThoughTheArenaIsFull) {
  constexpr uint64_t kBytes = 64 * kKiB;
  const HostStoreOptions options{.slots = 4, .slot_bytes = kBytes, .codec = Codec::kBf16};
  for (const uint64_t short_of : {kPage, uint64_t{0}}) {
    SCOPED_TRACE(short_of);
    const uint64_t budget = options.bytes() + 2 * 4 * kBytes - short_of;  // two batches of one thread, of all slots
    const auto memory = value_of(RankMemory::create(
        value_of(make_host_device()), linux_file_system(),
        {.arena_budget_bytes = budget, .arena_slab_bytes = kPage, .threads = 1, .host_compression = Codec::kBf16}));
    Result<std::shared_ptr<HostStore>> store = memory->make_host_store(options);
    if (short_of != 0) {
      EXPECT_FAILS(store, Code::kResourceExhausted);
      EXPECT_EQ(memory->arena().info().used_bytes, 0u);
      continue;
    }
    ASSERT_SUCCEEDS(store);
    EXPECT_FAILS(memory->arena().allocate(kPage), Code::kResourceExhausted);
    const DeviceAddress kv = allocate_blocks(*memory, 1, kBytes);
    const std::span<std::byte> block(reinterpret_cast<std::byte*>(kv), kBytes);  // NOLINT
    const ChunkPlan plan{.key = {.kind = ChunkKind::kKvBlock}, .pieces = {{kv, kBytes}}};
    for (const uint64_t seed : {1, 2}) {
      const std::vector<std::byte> before = bf16_values(seed, kBytes);
      std::copy(before.begin(), before.end(), block.begin());
      const JobId put = value_of(memory->transfers().submit(
          {.kind = JobKind::kSave, .store = store->get(), .chunks = {{.plan = &plan, .slot = 3}}}));
      const JobResult result = memory->transfers().wait(put);
      ASSERT_SUCCEEDS(result.status);
      std::fill(block.begin(), block.end(), std::byte{0});
      ASSERT_SUCCEEDS(
          BlockingTransfers(memory->transfers()).restore({&result.chunks[0].saved, 1}, {&plan, 1}, **store));
      EXPECT_TRUE(std::equal(before.begin(), before.end(), block.begin()));
      const orders::Save order{.tags = {"kv_cache"}, .blocks = {0}, .versions = {seed}, .steps = 9, .host_slots = {3}};
      EXPECT_EQ(value_of(call_rank(*memory, order)).reused_bytes, kBytes);
      detach_and_wake(*memory);
      EXPECT_TRUE(std::equal(before.begin(), before.end(), block.begin()));
      EXPECT_EQ(memory->transfers().kept_staging(), 4 * kBytes);
    }
    store->reset();
    value_of(call_rank(*memory, orders::Finish{.tags = {"kv_cache"}}));
    EXPECT_EQ(memory->transfers().kept_staging(), 0u) << "it is for the store alone";
  }
}

TEST_F(BorrowedKv, AWrongByteInTheStoreIsSeenByTheWake) {
  write(1, 11);
  store(0, 11);
  EXPECT_EQ(save(saving({1}, {0})), Moved(0, 1));
  detach();
  store_->view({.offset = 0})[5000] = std::byte{1};
  EXPECT_FAILS(call_rank(*memory_, orders::Restore{.tags = {"kv_cache"}}), Code::kCorruption, "block 1");
  call(orders::Undo{.what = orders::Undo::What::kRestore, .tags = {"kv_cache"}});
  store_->view({.offset = 0})[5000] = std::byte{11};
  wake();
  EXPECT_TRUE(holds(1, 11));
}

TEST_F(BorrowedKv, TheStoreMayEndWhileTheEngineSleeps) {
  write(1, 11);
  store(0, 11);
  EXPECT_EQ(save(saving({1}, {0})), Moved(0, 1));
  detach();
  store_.reset();
  wake();
  EXPECT_TRUE(holds(1, 11));
  EXPECT_EQ(save(saving({1}, {0})), Moved(1, 0));  // it is gone with the wake
}

TEST_F(BorrowedKv, WhatIsRetainedBesideThemHoldsNoStore) {
  write(1, 11), write(2, 12);
  store(0, 11);
  EXPECT_EQ(save(saving({1, 2}, {0, -1})), Moved(1, 1));
  detach();
  wake();
  const std::weak_ptr<HostStore> lender = store_;
  store_.reset();
  EXPECT_TRUE(lender.expired());
  EXPECT_EQ(save(saving({1, 2}, {0, -1})), Moved(1, 1));  // the second is retained
  detach();
  wake();
  EXPECT_TRUE(holds(1, 11) && holds(2, 12));
}

TEST_F(BorrowedKv, WhoWritesBlocksBesideTheEngineMakesItWorthless) {
  write(1, 11);
  store(0, 11);
  write(1, 22);
  memory_->mark_dirty("kv_cache");
  EXPECT_EQ(save(saving({1}, {0})), Moved(1, 0));
  detach();
  wake();
  EXPECT_TRUE(holds(1, 22));
}

// --- an engine ---

struct BackedBy {
  int ranks = 1;
  Codec codec = Codec::kNone;
};

class BackedSleep : public ::testing::TestWithParam<BackedBy> {
 protected:
  static constexpr int32_t kTokens = 30;
  struct Engine {
    std::vector<FaultyDevice*> devices;
    std::unique_ptr<ReferenceEngine> engine;
    std::unique_ptr<SleepController> controller;
    std::map<std::string, std::vector<int32_t>> tokens;

    void step(int steps = 1) {
      for (int i = 0; i < steps; ++i) {
        for (const ReferenceOutput& output : engine->step()) tokens[output.id].push_back(output.token);
      }
    }
    void offload() {
      while (engine->step_offload()) {}
    }
    int64_t slots() const { return engine->offload()->index().counts(StoreId::kHost).visible; }
  };
  Engine make(bool loads = true) {
    Engine made;
    std::vector<std::unique_ptr<DeviceMemory>> devices;
    for (int rank = 0; rank < GetParam().ranks; ++rank) {
      auto device = std::make_unique<FaultyDevice>(value_of(make_host_device()));
      made.devices.push_back(device.get());
      devices.push_back(std::move(device));
    }
    ReferenceOptions options{.weight_bytes = kWeightBytes, .kv_of_step = true, .host_compression = GetParam().codec};
    options.model.bf16 = GetParam().codec != Codec::kNone;
    if (!loads) options.num_blocks = 13;  // as many as a request has in the end: the next one gets them again
    options.tiers = {.host_blocks = 32, .loads = loads};
    options.tiers.offload = {.min_batch_size = 1, .flush_interval = std::chrono::milliseconds(0)};
    made.engine = value_of(ReferenceEngine::create(std::move(devices), linux_file_system(), system_clock(), options));
    made.controller = std::make_unique<SleepController>(*made.engine, linux_file_system(), system_clock(),
                                                        SleepControllerOptions{.directory = directory_.path()});
    return made;
  }
  static void add(Engine& engine, const std::string& id, int32_t prompt = 22) {
    ASSERT_SUCCEEDS(engine.engine->add(
        {.id = id, .prompt = std::vector<int32_t>(static_cast<size_t>(prompt), 7), .max_tokens = kTokens}));
  }
  struct Moved {
    uint64_t copied = 0;  // blocks of KV, all ranks together
    uint64_t reused = 0;
    friend bool operator==(const Moved&, const Moved&) = default;
    friend void PrintTo(const Moved& moved, std::ostream* out) {
      *out << moved.copied << " copied, " << moved.reused << " reused";
    }
  };
  Moved sleep(Engine& engine) {
    const SleepPlan plan = value_of(engine.controller->plan_sleep({.preserve_state = true}));
    const SleepReport report = value_of(engine.controller->sleep({.preserve_state = true}));
    const uint64_t block = engine.engine->memory().kv_layout().bytes_per_block();
    const uint64_t copied =
        report.saved_bytes - (kWeightBytes + reference::StepRegions::kBytes) * static_cast<uint64_t>(GetParam().ranks);
    EXPECT_EQ(plan.reused_bytes, report.reused_bytes);
    EXPECT_EQ(plan.save_bytes.at("kv_cache"), copied);
    return {copied / block, report.reused_bytes / block};
  }
  void wake(Engine& engine) {
    EXPECT_SUCCEEDS(engine.controller->wake_up({}));
    EXPECT_SUCCEEDS(engine.engine->offload()->check());
  }
  Moved blocks(int64_t copied, int64_t reused) const {
    return {static_cast<uint64_t>(copied * GetParam().ranks), static_cast<uint64_t>(reused * GetParam().ranks)};
  }

  static constexpr uint64_t kWeightBytes = 16'384;
  TemporaryDirectory directory_;
};
INSTANTIATE_TEST_SUITE_P(Ranks, BackedSleep,
                         ::testing::Values(BackedBy{.ranks = 1}, BackedBy{.ranks = 2},
                                           BackedBy{.ranks = 2, .codec = Codec::kBf16}));

TEST_P(BackedSleep, OnlyTheTailIsCopiedAndEveryTokenIsTheSame) {
  Engine reference = make();
  Engine engine = make();
  for (Engine* const each : {&reference, &engine}) add(*each, "a");
  for (Engine* const each : {&reference, &engine}) each->step(9);
  engine.offload();
  const int64_t full = engine.slots();
  ASSERT_GE(full, 5);
  EXPECT_EQ(sleep(engine), blocks(1, full));
  wake(engine);
  EXPECT_EQ(sleep(engine), blocks(1, full));  // without a step
  wake(engine);
  engine.step(8);  // nothing was offloaded meanwhile
  EXPECT_EQ(sleep(engine), blocks(3, full));
  wake(engine);
  while (!engine.engine->idle()) engine.step();
  while (!reference.engine->idle()) reference.step();
  EXPECT_EQ(engine.tokens["a"].size(), static_cast<size_t>(kTokens));
  EXPECT_EQ(engine.tokens, reference.tokens);
}

// The store has the key of each block, and other bytes.
TEST_P(BackedSleep, S1WhatWasComputedAgainIsCopiedThoughItsKeyIsThere) {
  Engine reference = make(/*loads=*/false);
  Engine engine = make(/*loads=*/false);
  int64_t first = 0;
  for (Engine* const each : {&reference, &engine}) {
    add(*each, "a");
    each->step(25);
    each->offload();
    first = each->slots();
    each->engine->abort("a");
    each->engine->pool().clear_cached();
    add(*each, "b");
    each->step(9);
    each->offload();
  }
  const int64_t of_prompt = 22 / 4;  // behind them the answers differ, and so do the keys
  ASSERT_GT(first, of_prompt);
  EXPECT_EQ(sleep(engine), blocks(of_prompt + 1, engine.slots() - first));
  wake(engine);
  while (!engine.engine->idle()) engine.step();
  while (!reference.engine->idle()) reference.step();
  EXPECT_EQ(engine.tokens, reference.tokens);
}

// While the engine sleeps its slots stay; afterwards, or where the sleep is undone, they are anybody's.
TEST_P(BackedSleep, S3SlotsAreKeptForAsLongAsTheSleepLasts) {
  for (const bool fails : {false, true}) {
    SCOPED_TRACE(fails);
    Engine engine = make();
    add(engine, "a");
    engine.step(9);
    engine.offload();
    const int64_t full = engine.slots();
    BlockIndex& index = engine.engine->offload()->index();
    const auto room = [&] {  // for blocks that nobody asks for
      std::vector<Slot> slots;
      for (uint8_t number = 1; number < 200; ++number) {
        const BlockKey key{.hash = {0, number}, .space = engine.engine->offload()->space()};
        const Result<Slot> slot = index.reserve(StoreId::kHost, &key);
        if (!slot) break;
        slots.push_back(*slot);
      }
      for (const Slot slot : slots) index.abandon(StoreId::kHost, slot, false);
      return static_cast<int64_t>(slots.size());
    };
    if (fails) {
      engine.devices.back()->fail_at(1, /*sticky=*/true);
      EXPECT_FAILS(engine.controller->sleep({.preserve_state = true}), Code::kDevice);
      engine.devices.back()->fail_at(0);
    } else {
      (void)sleep(engine);
      EXPECT_SUCCEEDS(engine.controller->wake_up({.tags = {"weights"}}));
      EXPECT_EQ(room(), 32 - full);
      wake(engine);
    }
    EXPECT_EQ(room(), 32);
  }
}

TEST_P(BackedSleep, S10WhereverTheDeviceFailsItIsAllOrNothing) {
  Engine reference = make();
  add(reference, "a");
  while (!reference.engine->idle()) reference.step();
  int undone = 0;
  for (uint64_t n = 1;; ++n) {
    SCOPED_TRACE(n);
    Engine engine = make();
    add(engine, "a");
    engine.step(9);
    engine.offload();
    const int64_t full = engine.slots();
    engine.devices.back()->fail_at(n);
    const Result<SleepReport> first = engine.controller->sleep({.preserve_state = true});
    const bool fired = engine.devices.back()->fired();
    engine.devices.back()->fail_at(0);
    if (engine.controller->state().engine == "unrecoverable") continue;
    if (first) {
      wake(engine);
    } else {
      ++undone;
    }
    EXPECT_EQ(sleep(engine), blocks(1, full));
    wake(engine);
    while (!engine.engine->idle()) engine.step();
    EXPECT_EQ(engine.tokens, reference.tokens);
    if (!fired) break;
  }
  EXPECT_GT(undone, 1);
}

}  // namespace
}  // namespace torpor
