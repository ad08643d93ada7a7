// SPDX-License-Identifier: Apache-2.0
// The contract over both stores, and host memory.
#include "allocator/host_arena.h"
#include "offload/host_store.h"
#include "tests/contract/store_contract.h"
#include "tests/offload/disk_world.h"
#include "tests/support/bf16_bytes.h"

namespace torpor {
namespace {

using namespace test;

class HostWorld : public StoreWorld {
 public:
  explicit HostWorld(Codec codec = Codec::kNone)
      : store_(value_of(
            HostStore::create(*arena_, {.slots = 100, .slot_bytes = kContractRecord, .codec = codec, .whole = 100}))) {}
  SlotStore& store() override { return *store_; }
  StoreSlot beyond() override { return 100; }

 private:
  std::unique_ptr<HostArena> arena_ = value_of(HostArena::create({.slab_bytes = kMiB}));
  std::unique_ptr<HostStore> store_;
};

// The contract's records do not get smaller: large ones lie in the whole places, small ones as they are in slots.
class PackedHostWorld final : public HostWorld {
 public:
  PackedHostWorld() : HostWorld(Codec::kBf16) {}
};

template <class World>
StoreWay way(std::string name, SegmentStoreOptions options = {}) {
  return {std::move(name), [options]() -> std::unique_ptr<StoreWorld> {
            if constexpr (std::is_base_of_v<HostWorld, World>)
              return std::make_unique<World>();
            else
              return std::make_unique<World>(options);
          }};
}

// Direct, and through io_uring where the system has it.
class RealDiskWorld final : public DiskWorld {
 public:
  explicit RealDiskWorld(SegmentStoreOptions options) : DiskWorld(std::move(options), &linux_file_system()) {}
};

INSTANTIATE_TEST_SUITE_P(
    Stores, StoreContract,
    ::testing::Values(
        way<HostWorld>("Host"), way<PackedHostWorld>("PackedHost"), way<DiskWorld>("Disk"),
        way<RealDiskWorld>("RealDisk"), way<RealDiskWorld>("RealDiskEncrypted", {.key = a_key(7), .encrypt = true}),
        way<RealDiskWorld>("Plain", {.io = FileIo::kPlain}),
        way<DiskWorld>("Compressed", {.compression = {.level = 1}}), way<DiskWorld>("Authenticated", {.key = a_key(7)}),
        way<DiskWorld>("Encrypted", {.key = a_key(7), .encrypt = true}),
        way<DiskWorld>("EncryptedAndCompressed", {.compression = {.level = 1}, .key = a_key(7), .encrypt = true}),
        way<DiskWorld>("OneOpenFile", {.open_files = 1})),
    [](const auto& info) { return info.param.name; });

// ---- host memory

TEST(HostStore, ASlotIsUsedAgainAndAgain) {
  HostWorld world;
  for (uint64_t seed = 1; seed < 5; ++seed) {
    ASSERT_SUCCEEDS(put_one(world.store(), 7, seed));
    EXPECT_TRUE(value_of(has_one(world.store(), 7, seed)));
  }
}

TEST(HostStore, WithoutHostMemoryItIsNotMade) {
  const auto small = value_of(HostArena::create({.budget_bytes = kMiB, .slab_bytes = kMiB}));
  EXPECT_FAILS(HostStore::create(*small, {.slots = 1000, .slot_bytes = 8192}), Code::kResourceExhausted);
  EXPECT_FAILS(HostStore::create(*small, {.slots = 0, .slot_bytes = 8192}), Code::kInvalidArgument);
  EXPECT_FAILS(HostStore::create(*small, {.slots = 1, .slot_bytes = 0}), Code::kInvalidArgument);
  EXPECT_FAILS(HostStore::create(*small, {.slots = 1, .slot_bytes = 8192, .codec = Codec::kZstd}),
               Code::kInvalidArgument, "zstd");
  EXPECT_EQ(small->info().used_bytes, 0u);
}

// ---- packed

constexpr uint64_t kBlock = 64 * kKiB;

StorePart part_with(StoreSlot slot, std::vector<std::byte>& bytes) {
  return {.slot = slot, .record = {.digest = digest_of(bytes)}, .bytes = bytes};
}

class PackedHostStore : public ::testing::Test {
 protected:
  Status put(StoreSlot slot, std::vector<std::byte> bytes) {
    StorePart part = part_with(slot, bytes);
    test::put(*store_, {&part, 1});
    return part.status;
  }
  Result<std::vector<std::byte>> get(StoreSlot slot) {
    std::vector<std::byte> bytes(kBlock);
    StorePart part{.slot = slot, .bytes = bytes};
    test::get(*store_, {&part, 1});
    if (!part.status) return part.status.error();
    EXPECT_EQ(part.record.digest, digest_of(bytes));
    return bytes;
  }
  std::unique_ptr<HostArena> arena_ = value_of(HostArena::create({.slab_bytes = kMiB}));
  std::unique_ptr<HostStore> store_ =
      value_of(HostStore::create(*arena_, {.slots = 100, .slot_bytes = kBlock, .codec = Codec::kBf16, .whole = 2}));
};

TEST_F(PackedHostStore, AsMuchMemoryHasRoomForThreeTenthsMoreBlocks) {
  for (const uint64_t bytes : {100 * kMiB, kGiB + 12'345, 64 * kGiB}) {
    const HostStoreOptions options{.slots = static_cast<int32_t>(HostStore::slots_in(bytes, kBlock, Codec::kBf16)),
                                   .slot_bytes = kBlock,
                                   .codec = Codec::kBf16};
    EXPECT_LE(options.bytes(), bytes);
    EXPECT_GT(options.bytes(), bytes - 3 * kBlock);
    EXPECT_GE(static_cast<double>(options.slots), 1.3 * static_cast<double>(bytes / kBlock));
    EXPECT_EQ(HostStore::slots_in(bytes, kBlock, Codec::kNone), bytes / kBlock);
  }
  EXPECT_EQ(HostStore::slots_in(kBlock, kBlock, Codec::kBf16), 0u);
}

TEST_F(PackedHostStore, ValuesComeBackAndAreNotShownAsTheyLie) {
  EXPECT_TRUE(store_->traits().in_memory);
  EXPECT_FALSE(store_->traits().addressable);
  for (StoreSlot slot = 0; slot < 100; ++slot)
    ASSERT_SUCCEEDS(put(slot, bf16_values(static_cast<uint64_t>(slot), kBlock)));
  for (StoreSlot slot = 0; slot < 100; ++slot)
    EXPECT_EQ(value_of(get(slot)), bf16_values(static_cast<uint64_t>(slot), kBlock));
  SavedChunk seventh{.bytes = kBlock, .offset = 7};
  EXPECT_TRUE(store_->view(seventh).empty());
  EXPECT_FAILS(store_->place(seventh), Code::kUnsupported);
  EXPECT_FALSE(store_->placed(7, {}).has_value());
  const HostStore::Stored stored = *store_->stored(7);
  EXPECT_EQ(stored.record.codec, Codec::kBf16);
  EXPECT_EQ(stored.bytes.size(), stored.record.stored);
  EXPECT_LE(stored.record.stored, kBlock * 77 / 100);
  EXPECT_EQ(store_->health().put_bytes, 100 * stored.record.stored);
}

// What stays large has places of its own, which are used again; without one it is not kept, and nothing else goes.
TEST_F(PackedHostStore, WhatStaysLargeIsKeptWhileThereIsAPlaceForIt) {
  ASSERT_SUCCEEDS(put(0, noise(1, kBlock)));
  ASSERT_SUCCEEDS(put(1, noise(2, kBlock)));
  ASSERT_SUCCEEDS(put(2, bf16_values(3, kBlock)));
  EXPECT_FAILS(put(2, noise(4, kBlock)), Code::kResourceExhausted, "65536");
  EXPECT_FAILS(get(2), Code::kNotFound);
  EXPECT_EQ(store_->health().write_errors, 1u);
  EXPECT_NE(store_->health().reason, "");
  EXPECT_EQ(value_of(get(0)), noise(1, kBlock));
  ASSERT_SUCCEEDS(put(0, bf16_values(5, kBlock)));  // which leaves the place
  ASSERT_SUCCEEDS(put(2, noise(6, kBlock)));
  const SlotRange second{.first = 1, .count = 1};
  store_->drop({&second, 1});
  store_->drop({&second, 1});
  ASSERT_SUCCEEDS(put(3, noise(7, kBlock)));
  EXPECT_EQ(value_of(get(0)), bf16_values(5, kBlock));
  EXPECT_EQ(value_of(get(2)), noise(6, kBlock));
  EXPECT_EQ(value_of(get(3)), noise(7, kBlock));
  EXPECT_FAILS(put(4, noise(8, kBlock)), Code::kResourceExhausted);
}

// The place that it left may have another block at once.
TEST_F(PackedHostStore, WhatIsDroppedWhileItIsReadIsReadWholeOrNotFound) {
  std::atomic<bool> over = false;
  std::thread writer([&] {
    for (uint64_t seed = 1; seed < 400; ++seed) {
      const SlotRange both{.first = 0, .count = 3};
      store_->drop({&both, 1});
      for (StoreSlot slot = 0; slot < 3; ++slot) (void)put(slot, noise(seed * 3 + static_cast<uint64_t>(slot), kBlock));
    }
    over = true;
  });
  while (!over) {
    for (StoreSlot slot = 0; slot < 3; ++slot) {
      const Result<std::vector<std::byte>> read = get(slot);
      EXPECT_TRUE(read || read.error().code == Code::kNotFound);
    }
  }
  writer.join();
}

TEST_F(PackedHostStore, DamagedBytesAreAnErrorAndNoValue) {
  ASSERT_SUCCEEDS(put(0, bf16_values(1, kBlock)));
  store_->stored(0)->bytes[0] = std::byte{255};  // no such base
  EXPECT_FAILS(get(0), Code::kCorruption);
}

}  // namespace
}  // namespace torpor
