// Blocks go down through a pipeline and come back up; every byte is compared.
#include "kvcache/tiered_blocks.h"

#include <cstring>
#include <random>

#include "allocator/host_device.h"
#include "base/units.h"
#include "offload/offload_pipeline.h"
#include "tests/support/faulty_device.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::FaultyDevice;
using test::value_of;
using namespace std::chrono_literals;

constexpr int32_t kTokens = 4;
constexpr int32_t kDeviceBlocks = 16;
constexpr uint64_t kPieceBytes = 1024;
constexpr uint32_t kLayers = 3;

// Late copies find a missing wait; layers lie apart, so a block is several pieces.
class TieredBlocksTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    device_ = std::make_unique<FaultyDevice>(value_of(make_host_device({.defer_copies = GetParam()})));
    bytes_ = align_up(kLayers * kDeviceBlocks * kPieceBytes, device_->granularity());
    address_ = value_of(device_->reserve(bytes_));
    memory_ = value_of(device_->create(bytes_));
    ASSERT_SUCCEEDS(device_->map(address_, memory_));
    ASSERT_SUCCEEDS(device_->set_access(address_, bytes_, Access::kReadWrite));
    layout_ = {.num_blocks = kDeviceBlocks, .tensors = {{.address = address_, .layers = kLayers, .layer_stride = kDeviceBlocks * kPieceBytes, .block_stride = kPieceBytes, .block_bytes = kPieceBytes}}};
    ASSERT_SUCCEEDS(layout_.validate());
    arena_ = value_of(HostArena::create());
    executor_ = value_of(TransferExecutor::create(*device_, *arena_, {.threads = 2}));
    pool_ = value_of(BlockPool::create({.num_blocks = kDeviceBlocks, .block_tokens = kTokens}));
    use_host_blocks(12);
  }
  void use_host_blocks(int32_t count) {
    tiers_.reset();
    host_ = value_of(HostBlocks::create(*arena_, {.num_blocks = count, .block_tokens = kTokens}, layout_.bytes_per_block()));
    tiers_ = std::make_unique<TieredBlocks>(*pool_, layout_, *host_, *executor_);
  }
  void TearDown() override {
    device_->fail_at(0);
    device_->drain_as(Drain::kCompleted);
    EXPECT_SUCCEEDS(pool_->check());
    EXPECT_SUCCEEDS(host_->pool().check());
    tiers_.reset();
    executor_.reset();
    ASSERT_SUCCEEDS(device_->unmap(address_, bytes_));
    ASSERT_SUCCEEDS(device_->release(memory_));
    ASSERT_SUCCEEDS(device_->free_reservation(address_));
  }

  // What the KV of the block with these tokens is.
  static std::vector<uint8_t> content(const BlockIdentity& identity, uint32_t layer) {
    std::mt19937 random(static_cast<unsigned>(identity.hash().bytes[0] * 256 + identity.hash().bytes[1]) + layer);
    std::vector<uint8_t> bytes(kPieceBytes);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    return bytes;
  }
  uint8_t* piece(int32_t slot, uint32_t layer) {
    return reinterpret_cast<uint8_t*>(address_ + (layer * kDeviceBlocks + static_cast<uint64_t>(slot)) * kPieceBytes);  // NOLINT(performance-no-int-to-ptr)
  }
  // A chain of computed, registered blocks in the device.
  std::vector<BlockRef> compute(int32_t seed, int count) {
    std::vector<BlockRef> blocks;
    Digest parent;
    for (int i = 0; i < count; ++i) {
      MutableBlock block = std::move(value_of(pool_->allocate(1))[0]);
      EXPECT_SUCCEEDS(block.initialize(parent, 0));
      EXPECT_SUCCEEDS(block.add_tokens(std::vector<int32_t>{seed, seed + i, 2, 3}));
      EXPECT_SUCCEEDS(block.schedule_compute());
      EXPECT_SUCCEEDS(block.compute_done());
      const int32_t slot = block.id();
      blocks.push_back(value_of(block.register_block()));
      parent = blocks.back().identity().hash();
      for (uint32_t layer = 0; layer < kLayers; ++layer) std::memcpy(piece(slot, layer), content(blocks.back().identity(), layer).data(), kPieceBytes);
    }
    return blocks;
  }
  static std::vector<BlockName> names(const std::vector<BlockRef>& blocks) {
    std::vector<BlockName> list;
    for (const BlockRef& block : blocks) list.push_back(name_of(WeakBlock(block), block.identity()));
    return list;
  }
  static std::vector<BlockIdentity> identities(const std::vector<BlockRef>& blocks) {
    std::vector<BlockIdentity> list;
    for (const BlockRef& block : blocks) list.push_back(block.identity());
    return list;
  }
  void expect_content(const std::vector<BlockRef>& blocks) {
    for (const BlockRef& block : blocks) {
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        EXPECT_EQ(std::memcmp(piece(block.id(), layer), content(block.identity(), layer).data(), kPieceBytes), 0) << "block " << block.id() << " layer " << layer;
      }
    }
  }
  void wipe_device() {
    pool_->clear_cached();
    std::memset(piece(0, 0), 0xee, kLayers * kDeviceBlocks * kPieceBytes);
  }
  // Down, as one container, at once.
  OffloadHandle offload(const std::vector<BlockName>& blocks) {
    if (pipeline_ == nullptr) pipeline_ = value_of(OffloadPipeline::create(*tiers_, system_clock(), {.min_batch_size = 1}));
    OffloadHandle handle = pipeline_->enqueue(blocks);
    handle.wait();
    return handle;
  }

  std::unique_ptr<FaultyDevice> device_;
  uint64_t bytes_ = 0;
  DeviceAddress address_ = 0;
  PhysicalId memory_{};
  KvLayout layout_;
  std::unique_ptr<HostArena> arena_;
  std::unique_ptr<TransferExecutor> executor_;
  std::unique_ptr<BlockPool> pool_;
  std::unique_ptr<HostBlocks> host_;
  std::unique_ptr<TieredBlocks> tiers_;
  std::unique_ptr<OffloadPipeline> pipeline_;  // ends before what it uses
};
INSTANTIATE_TEST_SUITE_P(Device, TieredBlocksTest, ::testing::Bool(), [](const auto& info) { return info.param ? "CopiesLate" : "CopiesAtOnce"; });

TEST_P(TieredBlocksTest, BlocksGoDownAndComeBackUpByteForByte) {
  std::vector<BlockRef> blocks = compute(10, 6);
  const auto chain = identities(blocks);
  EXPECT_EQ(offload(names(blocks)).count(BlockOutcome::kTransferred), 6u);
  blocks.clear();
  wipe_device();
  const auto up = value_of(tiers_->onboard(chain));
  ASSERT_EQ(up.size(), 6u);
  EXPECT_EQ(identities(up), chain);
  expect_content(up);
  EXPECT_EQ(pool_->match(chain).size(), 6u);  // and they are in the prefix index again
  EXPECT_EQ(tiers_->info().onboarded, 6u);
}

TEST_P(TieredBlocksTest, ABlockThatWasEvictedMeanwhileIsNotOffloadedAsSomethingElse) {
  std::vector<BlockName> stale;
  {
    const auto blocks = compute(10, 2);
    stale = names(blocks);
  }
  const auto others = compute(50, kDeviceBlocks);  // takes every slot
  EXPECT_EQ(offload(stale).count(BlockOutcome::kEvicted), 2u);
  EXPECT_EQ(host_->pool().info().cached, 0);
}

TEST_P(TieredBlocksTest, WhatIsThereAlreadyIsNotCopiedAgain) {
  const auto blocks = compute(10, 3);
  offload(names(blocks));
  EXPECT_EQ(offload(names(blocks)).count(BlockOutcome::kPresent), 3u);
  EXPECT_EQ(host_->pool().info().cached, 3);
}

TEST_P(TieredBlocksTest, AFullHostEvictsItsOldestAndWhatIsKeptThereStays) {
  use_host_blocks(4);
  const auto first = compute(10, 4);
  offload(names(first));
  const auto kept = host_->pool().match(identities(first));  // somebody is about to read them
  const auto second = compute(50, 2);
  EXPECT_EQ(offload(names(second)).count(BlockOutcome::kNoRoom), 2u);
  EXPECT_EQ(tiers_->fill(), 1.0);
}

TEST_P(TieredBlocksTest, I2I5OneFailedCopyIsOneFailedBlockAndItIsNotVisible) {
  for (uint64_t n = 1; n <= 4; ++n) {
    const auto blocks = compute(static_cast<int32_t>(100 * n), 3);
    device_->fail_at(n, /*sticky=*/false);
    const OffloadHandle handle = offload(names(blocks));
    device_->fail_at(0);
    // The batch fails at copy n, then each block is tried alone: all of them arrive, and nothing false is seen.
    EXPECT_EQ(handle.count(BlockOutcome::kTransferred), 3u) << n;
    host_->pool().clear_cached();
  }
  const auto blocks = compute(900, 3);
  device_->fail_at(1, /*sticky=*/true);
  EXPECT_EQ(offload(names(blocks)).count(BlockOutcome::kFailed), 3u);
  device_->fail_at(0);
  EXPECT_FALSE(host_->pool().contains(blocks[0].identity()));
  EXPECT_EQ(host_->pool().info().free, 12);  // their slots are free again
  EXPECT_EQ(offload(names(blocks)).count(BlockOutcome::kTransferred), 3u);
}

TEST_P(TieredBlocksTest, I3AfterAnUnprovenCopyBothSidesAreNeverUsedAgain) {
  auto blocks = compute(10, 2);
  device_->drain_as(Drain::kUnproven);
  EXPECT_EQ(offload(names(blocks)).count(BlockOutcome::kUnproven), 2u);
  device_->drain_as(Drain::kCompleted);
  blocks.clear();
  EXPECT_EQ(tiers_->info().quarantined, 2u);
  EXPECT_EQ(pool_->clear_cached(), 0);
  EXPECT_EQ(pool_->info().shared, 2);            // the device blocks are kept for ever
  EXPECT_EQ(host_->pool().info().quarantined, 2);
}

TEST_P(TieredBlocksTest, I8ABlockWithAWrongByteIsAMissAndIsDropped) {
  const auto chain = [&] {
    const auto blocks = compute(10, 4);
    offload(names(blocks));
    return identities(blocks);
  }();
  const int32_t slot = host_->pool().match(chain)[2].id();
  host_->view({.key = {.index = static_cast<uint64_t>(slot)}, .bytes = layout_.bytes_per_block()})[5] ^= std::byte{1};
  wipe_device();
  const auto up = value_of(tiers_->onboard(chain));
  EXPECT_EQ(up.size(), 2u);  // the run ends before it
  expect_content(up);
  EXPECT_EQ(tiers_->info().damaged, 1u);
  EXPECT_FALSE(host_->pool().contains(chain[2]));
  EXPECT_TRUE(host_->pool().contains(chain[3]));
  EXPECT_EQ(pool_->info().quarantined, 0);
}

TEST_P(TieredBlocksTest, WithoutRoomInTheDeviceNothingIsOnboarded) {
  const auto chain = [&] {
    const auto blocks = compute(10, 4);
    offload(names(blocks));
    return identities(blocks);
  }();
  wipe_device();
  const auto busy = value_of(pool_->allocate(kDeviceBlocks - 3));
  EXPECT_FAILS(tiers_->onboard(chain), Code::kResourceExhausted);
  EXPECT_EQ(pool_->info().free, 3);
  EXPECT_TRUE(value_of(tiers_->onboard({})).empty());
}

// Random lives: chains are computed, offloaded, evicted and onboarded again; whatever comes back is right.
TEST_P(TieredBlocksTest, UnderRandomUseWhatComesBackIsAlwaysRight) {
  std::mt19937 random(3);
  std::map<int32_t, std::vector<BlockIdentity>> chains;
  uint64_t hits = 0;
  for (int i = 0; i < 400; ++i) {
    const auto seed = static_cast<int32_t>(1000 * (1 + random() % 12));
    if (chains.contains(seed) && random() % 2 == 0) {
      wipe_device();
      if (random() % 4 == 0) device_->fail_at(1 + random() % 6);
      const auto up = value_of(tiers_->onboard(chains[seed]));
      device_->fail_at(0);
      expect_content(up);
      hits += up.size();
    } else {
      const auto blocks = compute(seed, static_cast<int>(1 + random() % 5));
      chains[seed] = identities(blocks);
      if (random() % 4 == 0) device_->fail_at(1 + random() % 6);
      offload(names(blocks));
      device_->fail_at(0);
    }
    ASSERT_SUCCEEDS(pool_->check());
    ASSERT_SUCCEEDS(host_->pool().check());
  }
  EXPECT_GT(hits, 50u);
}

}  // namespace
}  // namespace torpor
