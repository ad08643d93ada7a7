// The contract over both stores, and host memory.
#include "allocator/host_arena.h"
#include "offload/host_store.h"
#include "tests/contract/store_contract.h"
#include "tests/offload/disk_world.h"

namespace torpor {
namespace {

using namespace test;

class HostWorld final : public StoreWorld {
 public:
  Store& store() override { return *store_; }
  std::vector<Slot> fresh(int32_t count) override {
    std::vector<Slot> slots;
    for (int32_t i = 0; i < count; ++i) slots.push_back(next_++);
    return slots;
  }
  Slot beyond() override { return 100; }

 private:
  std::unique_ptr<HostArena> arena_ = value_of(HostArena::create({.slab_bytes = kMiB}));
  std::unique_ptr<HostStore> store_ =
      value_of(HostStore::create(*arena_, {.slots = 100, .slot_bytes = kContractRecord}));
  Slot next_ = 0;
};

template <class World>
StoreWay way(std::string name, SegmentStoreOptions options = {}) {
  return {std::move(name), [options]() -> std::unique_ptr<StoreWorld> {
            if constexpr (std::is_same_v<World, HostWorld>)
              return std::make_unique<HostWorld>();
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
    ::testing::Values(way<HostWorld>("Host"), way<DiskWorld>("Disk"), way<RealDiskWorld>("RealDisk"),
                      way<RealDiskWorld>("RealDiskEncrypted", {.key = a_key(7), .encrypt = true}),
                      way<RealDiskWorld>("Plain", {.io = FileIo::kPlain}),
                      way<DiskWorld>("Compressed", {.compression = {.level = 1}}),
                      way<DiskWorld>("Authenticated", {.key = a_key(7)}),
                      way<DiskWorld>("Encrypted", {.key = a_key(7), .encrypt = true}),
                      way<DiskWorld>("EncryptedAndCompressed",
                                     {.compression = {.level = 1}, .key = a_key(7), .encrypt = true}),
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
  EXPECT_EQ(small->info().used_bytes, 0u);
}

}  // namespace
}  // namespace torpor
