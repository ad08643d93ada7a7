// Blocks go down through a pipeline and come back up; every byte is compared.
#include <atomic>
#include <cstdlib>
#include <fstream>

#include "kvcache/block_routes.h"
#include "kvcache/block_tier.h"
#include "kvcache/onboarding.h"
#include "offload/host_store.h"

#include <cstring>
#include <random>

#include "allocator/host_device.h"
#include "base/units.h"
#include "offload/offload_pipeline.h"
#include "tests/support/faulty_device.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/manual_clock.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace {
std::atomic<bool> no_aligned_memory = false;
}

// In place of the system's own. posix_memalign gives memory that free() takes back, also under a sanitizer.
extern "C" void* aligned_alloc(size_t alignment, size_t size) {
  void* memory = nullptr;
  return !no_aligned_memory && ::posix_memalign(&memory, alignment, size) == 0 ? memory : nullptr;
}

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
class BlockTiersTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    device_ = std::make_unique<FaultyDevice>(value_of(make_host_device({.defer_copies = GetParam()})));
    bytes_ = align_up(kLayers * kDeviceBlocks * kPieceBytes, device_->granularity());
    address_ = value_of(device_->reserve(bytes_));
    memory_ = value_of(device_->create(bytes_));
    ASSERT_SUCCEEDS(device_->map(address_, memory_));
    ASSERT_SUCCEEDS(device_->set_access(address_, bytes_, Access::kReadWrite));
    layout_ = {.num_blocks = kDeviceBlocks,
               .tensors = {{.address = address_,
                            .layers = kLayers,
                            .layer_stride = kDeviceBlocks * kPieceBytes,
                            .block_stride = kPieceBytes,
                            .block_bytes = kPieceBytes}}};
    ASSERT_SUCCEEDS(layout_.validate());
    arena_ = value_of(HostArena::create());
    transfers_ = value_of(TransferEngine::create(*device_, *arena_, {.threads = 2}));
    pool_ = value_of(BlockPool::create({.num_blocks = kDeviceBlocks, .block_tokens = kTokens}));
    use_host_blocks(12);
  }
  void use_host_blocks(int32_t count) {
    onboarding_.reset();
    to_host_.reset();
    host_ = host_tier(count, kTokens);
    to_host_ = std::make_unique<DeviceRoute>(*pool_, layout_, *host_, *transfers_);
    onboard_from({host_.get()});
  }
  std::unique_ptr<BlockTier> host_tier(int32_t count, int32_t tokens) {
    const uint64_t bytes = layout_.bytes_per_block();
    return value_of(BlockTier::create(value_of(HostStore::create(*arena_, {.slots = count, .slot_bytes = bytes})),
                                      {{.num_blocks = count, .block_tokens = tokens}, bytes, {}}));
  }
  void onboard_from(std::vector<BlockTier*> stores, DiskOnboarding mode = DiskOnboarding::kDirect) {
    onboarding_ = std::make_unique<Onboarding>(*pool_, layout_, *transfers_, std::move(stores), mode);
  }
  SegmentStoreOptions disk_options(int32_t blocks = 12) const {
    return segments_for(blocks, layout_.bytes_per_block());
  }
  Result<std::unique_ptr<SegmentStore>> open_segments(const SegmentStoreOptions& options) {
    return SegmentStore::open(*disk_files_, temporary_ / "store", options, clock_);
  }
  void open_disk(const Digest& space, const SegmentStoreOptions& options) {
    disk_.reset();
    disk_ =
        value_of(BlockTier::create(value_of(open_segments(options)),
                                   {{.num_blocks = 12, .block_tokens = kTokens}, layout_.bytes_per_block(), space}));
  }
  void open_disk(const Digest& space = {}) { open_disk(space, disk_options()); }
  StoreHealth disk_health() { return disk_->store().health(); }
  void TearDown() override {
    device_->fail_at(0);
    device_->drain_as(Drain::kCompleted);
    EXPECT_SUCCEEDS(pool_->check());
    EXPECT_SUCCEEDS(host_->pool().check());
    pipelines_.clear();
    onboarding_.reset();
    to_host_.reset();
    transfers_.reset();
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
    return reinterpret_cast<uint8_t*>(address_ + (layer * kDeviceBlocks + static_cast<uint64_t>(slot)) *
                                                     kPieceBytes);  // NOLINT(performance-no-int-to-ptr)
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
      for (uint32_t layer = 0; layer < kLayers; ++layer)
        std::memcpy(piece(slot, layer), content(blocks.back().identity(), layer).data(), kPieceBytes);
    }
    return blocks;
  }
  static std::vector<BlockName> names(const std::vector<BlockRef>& blocks) {
    std::vector<BlockName> list;
    for (const BlockRef& block : blocks) list.push_back(name_of(block));
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
        EXPECT_EQ(std::memcmp(piece(block.id(), layer), content(block.identity(), layer).data(), kPieceBytes), 0)
            << "block " << block.id() << " layer " << layer;
      }
    }
  }
  void wipe_device() {
    pool_->clear_cached();
    std::memset(piece(0, 0), 0xee, kLayers * kDeviceBlocks * kPieceBytes);
  }
  // A pipeline that sends what it gets at once.
  OffloadPipeline& pipeline(BlockRoute& route) {
    auto& made = pipelines_[&route];
    if (made == nullptr) made = value_of(OffloadPipeline::create(route, system_clock(), {.min_batch_size = 1}));
    return *made;
  }
  // Down, as one container.
  OffloadHandle offload(const std::vector<BlockName>& blocks, BlockRoute* route = nullptr) {
    OffloadHandle handle = pipeline(route != nullptr ? *route : *to_host_).enqueue(blocks);
    handle.wait();
    return handle;
  }
  // A chain that is in the disk tier and nowhere else.
  std::vector<BlockIdentity> chain_on_disk(int32_t seed, int count) {
    DeviceRoute to_disk(*pool_, layout_, *disk_, *transfers_);
    std::vector<BlockIdentity> chain;
    {
      const auto blocks = compute(seed, count);
      chain = identities(blocks);
      EXPECT_EQ(offload(names(blocks), &to_disk).count(BlockOutcome::kTransferred), static_cast<uint64_t>(count));
    }
    pipelines_.erase(&to_disk);
    wipe_device();
    return chain;
  }
  std::string segment(uint32_t number) const { return temporary_ / ("store/r0/" + segment_name(number)); }
  void flip_byte_in_file(uint64_t offset) {
    std::fstream file(segment(0), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    const char byte = static_cast<char>(file.get() ^ 1);
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(byte);
  }

  std::unique_ptr<FaultyDevice> device_;
  uint64_t bytes_ = 0;
  DeviceAddress address_ = 0;
  PhysicalId memory_{};
  KvLayout layout_;
  std::unique_ptr<HostArena> arena_;
  std::unique_ptr<TransferEngine> transfers_;
  std::unique_ptr<BlockPool> pool_;
  std::unique_ptr<BlockTier> host_;
  std::unique_ptr<DeviceRoute> to_host_;
  test::TemporaryDirectory temporary_;
  test::FaultyFileSystem file_system_;
  FileSystem* disk_files_ = &file_system_;
  test::ManualClock clock_;
  std::unique_ptr<BlockTier> disk_;
  std::unique_ptr<Onboarding> onboarding_;
  std::map<BlockRoute*, std::unique_ptr<OffloadPipeline>> pipelines_;  // end before what they use
};
INSTANTIATE_TEST_SUITE_P(Device, BlockTiersTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "CopiesLate" : "CopiesAtOnce"; });

TEST_P(BlockTiersTest, BlocksGoDownAndComeBackUpByteForByte) {
  std::vector<BlockRef> blocks = compute(10, 6);
  const auto chain = identities(blocks);
  EXPECT_EQ(offload(names(blocks)).count(BlockOutcome::kTransferred), 6u);
  blocks.clear();
  wipe_device();
  const auto up = value_of(onboarding_->onboard(chain));
  ASSERT_EQ(up.size(), 6u);
  EXPECT_EQ(identities(up), chain);
  expect_content(up);
  EXPECT_EQ(pool_->match(chain).size(), 6u);  // and they are in the prefix index again
  EXPECT_EQ(onboarding_->info().onboarded[0], 6u);
}

TEST_P(BlockTiersTest, ABlockThatWasEvictedMeanwhileIsNotOffloadedAsSomethingElse) {
  std::vector<BlockName> stale;
  {
    const auto blocks = compute(10, 2);
    stale = names(blocks);
  }
  const auto others = compute(50, kDeviceBlocks);  // takes every slot
  EXPECT_EQ(offload(stale).count(BlockOutcome::kEvicted), 2u);
  EXPECT_EQ(host_->pool().info().cached, 0);
}

TEST_P(BlockTiersTest, WhatIsThereAlreadyIsNotCopiedAgain) {
  const auto blocks = compute(10, 3);
  offload(names(blocks));
  EXPECT_EQ(offload(names(blocks)).count(BlockOutcome::kPresent), 3u);
  EXPECT_EQ(host_->pool().info().cached, 3);
}

TEST_P(BlockTiersTest, AFullHostEvictsItsOldestAndWhatIsKeptThereStays) {
  use_host_blocks(4);
  const auto first = compute(10, 4);
  offload(names(first));
  const auto kept = host_->pool().match(identities(first));  // somebody is about to read them
  const auto second = compute(50, 2);
  EXPECT_EQ(offload(names(second)).count(BlockOutcome::kNoRoom), 2u);
  EXPECT_EQ(host_->pool().info().shared, 4);
}

TEST_P(BlockTiersTest, I2I5OneFailedCopyIsOneFailedBlockAndItIsNotVisible) {
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

TEST_P(BlockTiersTest, I3AfterAnUnprovenCopyBothSidesAreNeverUsedAgain) {
  auto blocks = compute(10, 2);
  device_->drain_as(Drain::kUnproven);
  EXPECT_EQ(offload(names(blocks)).count(BlockOutcome::kUnproven), 2u);
  device_->drain_as(Drain::kCompleted);
  blocks.clear();
  EXPECT_EQ(to_host_->quarantined(), 2);
  EXPECT_EQ(pool_->clear_cached(), 0);
  EXPECT_EQ(pool_->info().shared, 2);  // the device blocks are kept for ever
  EXPECT_EQ(host_->pool().info().quarantined, 2);
}

TEST_P(BlockTiersTest, I8ABlockWithAWrongByteIsAMissAndIsDropped) {
  const auto chain = [&] {
    const auto blocks = compute(10, 4);
    offload(names(blocks));
    return identities(blocks);
  }();
  const int32_t slot = host_->pool().match(chain)[2].id();
  host_->view({.key = {.index = static_cast<uint64_t>(slot)}, .bytes = layout_.bytes_per_block()})[5] ^= std::byte{1};
  wipe_device();
  const auto up = value_of(onboarding_->onboard(chain));
  EXPECT_EQ(up.size(), 2u);  // the run ends before it
  expect_content(up);
  EXPECT_EQ(onboarding_->info().damaged, 1u);
  EXPECT_FALSE(host_->pool().contains(chain[2]));
  EXPECT_TRUE(host_->pool().contains(chain[3]));
  EXPECT_EQ(pool_->info().quarantined, 0);
}

TEST_P(BlockTiersTest, WithoutRoomInTheDeviceNothingIsOnboarded) {
  const auto chain = [&] {
    const auto blocks = compute(10, 4);
    offload(names(blocks));
    return identities(blocks);
  }();
  wipe_device();
  const auto busy = value_of(pool_->allocate(kDeviceBlocks - 3));
  EXPECT_FAILS(onboarding_->onboard(chain), Code::kResourceExhausted);
  EXPECT_EQ(pool_->info().free, 3);
  EXPECT_TRUE(value_of(onboarding_->onboard({})).empty());
}

// Random lives: chains are computed, offloaded, evicted and onboarded again; whatever comes back is right.
TEST_P(BlockTiersTest, UnderRandomUseWhatComesBackIsAlwaysRight) {
  std::mt19937 random(3);
  std::map<int32_t, std::vector<BlockIdentity>> chains;
  uint64_t hits = 0;
  for (int i = 0; i < 400; ++i) {
    const auto seed = static_cast<int32_t>(1000 * (1 + random() % 12));
    if (chains.contains(seed) && random() % 2 == 0) {
      wipe_device();
      if (random() % 4 == 0) device_->fail_at(1 + random() % 6);
      const auto up = value_of(onboarding_->onboard(chains[seed]));
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

// --- the disk
// ------------------------------------------------------------------------------------------------------------

TEST_P(BlockTiersTest, RegistrationInTheHostSendsBlocksOnToTheDisk) {
  open_disk();
  HostRoute to_disk(*host_, *disk_);
  to_host_->on_registered([&](std::vector<BlockName> blocks) { pipeline(to_disk).enqueue(std::move(blocks)); });
  pipeline(to_disk);
  auto blocks = compute(10, 5);
  const auto chain = identities(blocks);
  offload(names(blocks));
  pipeline(to_disk).drain();
  EXPECT_EQ(pipeline(to_disk).counts()[static_cast<size_t>(BlockOutcome::kTransferred)], 5u);
  EXPECT_EQ(disk_->pool().info().cached, 5);
  blocks.clear();
  wipe_device();
  host_->pool().clear_cached();
  onboard_from({host_.get(), disk_.get()});
  const auto up = value_of(onboarding_->onboard(chain));
  ASSERT_EQ(up.size(), 5u);
  expect_content(up);
  EXPECT_EQ(onboarding_->info().onboarded, (std::vector<uint64_t>{0, 5}));
  pipelines_.clear();
}

TEST_P(BlockTiersTest, ARunMayComeFromBothStoresDirectOrStaged) {
  for (const DiskOnboarding mode : {DiskOnboarding::kDirect, DiskOnboarding::kStaged}) {
    open_disk();
    const auto seed = static_cast<int32_t>(100 * (1 + static_cast<int>(mode)));
    const auto chain = chain_on_disk(seed, 6);
    {
      const auto blocks = compute(seed, 6);
      const auto all = names(blocks);
      offload({all[0], all[1], all[4]});
    }
    wipe_device();
    onboard_from({host_.get(), disk_.get()}, mode);
    const auto up = value_of(onboarding_->onboard(chain));
    ASSERT_EQ(up.size(), 6u);
    expect_content(up);
    const bool staged = mode == DiskOnboarding::kStaged;
    EXPECT_EQ(onboarding_->info().promoted, staged ? 3u : 0u);
    EXPECT_EQ(onboarding_->info().onboarded, (staged ? std::vector<uint64_t>{6, 0} : std::vector<uint64_t>{3, 3}));
    EXPECT_EQ(host_->pool().contains(chain[5]), staged);
  }
}

TEST_P(BlockTiersTest, AfterARestartTheDiskStillHasItsBlocks) {
  disk_files_ = &linux_file_system();
  for (const FileIo io : {FileIo::kFastest, FileIo::kPlain}) {
    SegmentStoreOptions options = disk_options();
    options.io = io;
    open_disk({}, options);
    const auto chain = chain_on_disk(io == FileIo::kPlain ? 10 : 20, 4);
    open_disk({}, options);
    EXPECT_GE(disk_->recovered(), 4u);
    EXPECT_EQ(disk_->pool().info().cached, 0);  // each takes its place when it is asked for
    EXPECT_EQ(disk_health().io == "plain", io == FileIo::kPlain);
    onboard_from({disk_.get()});
    const auto up = value_of(onboarding_->onboard(chain));
    ASSERT_EQ(up.size(), 4u);
    expect_content(up);
    EXPECT_EQ(disk_->pool().info().cached, 4);
  }
}

TEST_P(BlockTiersTest, WhatARestartFoundIsNotPutAgainAndGoesWithItsSegment) {
  open_disk();
  const auto chain = chain_on_disk(10, 4);
  open_disk();
  EXPECT_TRUE(disk_->contains(chain[3]));
  EXPECT_TRUE(disk_->contains(chain[3].hash()));
  {
    DeviceRoute to_disk(*pool_, layout_, *disk_, *transfers_);
    EXPECT_EQ(offload(names(compute(10, 4)), &to_disk).count(BlockOutcome::kPresent), 4u);
    pipelines_.clear();
  }
  for (int32_t seed = 100; seed < 1000; seed += 100) {  // until its segments are the oldest
    (void)chain_on_disk(seed, 3);
    EXPECT_LE(disk_health().held_bytes, disk_options().budget_bytes);
  }
  EXPECT_EQ(disk_->recovered(), 0u);
  EXPECT_FALSE(disk_->contains(chain[0]));
  onboard_from({disk_.get()});
  EXPECT_EQ(value_of(onboarding_->onboard(chain)).size(), 0u);
  EXPECT_FALSE(boost::filesystem::exists(segment(0)));
}

// The pool has room for all of them, the segments have not: the oldest of them went.
TEST_P(BlockTiersTest, ABlockWhoseSegmentWentIsAMiss) {
  open_disk();
  const auto chain = chain_on_disk(10, 4);
  {
    const BlockRef kept = disk_->find(chain[0]);
    ASSERT_TRUE(kept);
    const SlotRange all{.first = 0, .count = 1000};
    disk_->store().drop({&all, 1});
  }
  onboard_from({disk_.get()});
  EXPECT_EQ(value_of(onboarding_->onboard(chain)).size(), 0u);
  EXPECT_FALSE(disk_->contains(chain[0]));
}

TEST_P(BlockTiersTest, BlocksOfAnotherModelAreNotThere) {
  open_disk();
  const auto chain = chain_on_disk(10, 4);
  open_disk(digest_of({}));
  EXPECT_EQ(disk_->recovered(), 0u);
  EXPECT_FALSE(disk_->contains(chain[0]));
}

TEST_P(BlockTiersTest, BlocksOfOtherWeightsAreNeverFoundAgainAfterARestartNeither) {
  open_disk();
  const auto before = chain_on_disk(10, 4);
  disk_->forget_all();  // other weights, of which nobody knows the name
  EXPECT_FALSE(disk_->contains(before[0]));
  const auto after = chain_on_disk(20, 3);
  onboard_from({disk_.get()});
  EXPECT_EQ(value_of(onboarding_->onboard(after)).size(), 3u);
  wipe_device();
  open_disk();  // with the key space's old name: with the weights that it stands for
  EXPECT_EQ(disk_->recovered(), 0u);
  disk_->forget_all(digest_of({}));  // weights with a name
  const auto named = chain_on_disk(30, 2);
  open_disk(digest_of({}));
  EXPECT_EQ(disk_->recovered(), 2u);
  EXPECT_TRUE(disk_->contains(named[1]));
  open_disk();
  EXPECT_EQ(disk_->recovered(), 0u);
}

TEST_P(BlockTiersTest, WithoutMemoryForABatchPutsFailAndTheDiskIsTriedAgain) {
  open_disk();
  DeviceRoute to_disk(*pool_, layout_, *disk_, *transfers_);
  const auto blocks = compute(10, 3);
  no_aligned_memory = true;
  EXPECT_EQ(offload(names(blocks), &to_disk).count(BlockOutcome::kFailed), 3u);
  no_aligned_memory = false;
  EXPECT_NE(disk_health().reason.find("no memory"), std::string::npos);
  clock_.advance(10s);
  EXPECT_EQ(offload(names(blocks), &to_disk).count(BlockOutcome::kTransferred), 3u);
  pipelines_.clear();
}

// The second block of the chain is of a store with smaller blocks, and cannot be registered: those behind it are not
// lost for that.
TEST_P(BlockTiersTest, AnOnboardingThatIsGivenUpLosesNoDeviceBlock) {
  const auto first = compute(10, 1);
  ASSERT_EQ(offload(names(first)).count(BlockOutcome::kTransferred), 1u);
  const auto small = host_tier(2, kTokens / 2);
  std::vector<BlockIdentity> chain = identities(first);
  const auto put = [&](BlockTier& store, const BlockIdentity& identity) {
    MutableBlock slot = std::move(value_of(store.pool().allocate(1))[0]);
    ASSERT_SUCCEEDS(begin_filling(slot, identity));
    ASSERT_SUCCEEDS(slot.compute_done());
    store.claim(slot.id(), identity);
    SavedChunk chunk = store.chunk(slot.id());
    store.remember(slot.id(), digest_of(value_of(store.place(chunk))));
    ASSERT_SUCCEEDS(slot.register_block());
    chain.push_back(identity);
  };
  put(*small, {.parent = chain[0].hash(), .tokens = {1, 2}});
  put(*host_, {.parent = chain[1].hash(), .tokens = {1, 2, 3, 4}});
  wipe_device();
  onboard_from({host_.get(), small.get()});
  EXPECT_FALSE(onboarding_->onboard(chain).has_value());
  EXPECT_EQ(pool_->info().quarantined, 0);
  onboard_from({host_.get()});
  EXPECT_EQ(value_of(onboarding_->onboard(chain)).size(), 1u);
}

TEST_P(BlockTiersTest, TwoProcessesDoNotShareADirectory) {
  open_disk();
  EXPECT_FAILS(open_segments(disk_options()), Code::kUnavailable, "store/r0");
}

// One segment: header, batch page, three blocks.
TEST_P(BlockTiersTest, I8WhateverByteOfASegmentIsWrongItIsAMiss) {
  const uint64_t second = 2 * kPage + align_up(layout_.bytes_per_block(), kPage);
  for (const uint64_t offset : {uint64_t{0}, uint64_t{9}, uint64_t{50}, uint64_t{100}, kPage + 10, kPage + 40,
                                2 * kPage - 1, second, second + layout_.bytes_per_block() - 1}) {
    SCOPED_TRACE(offset);
    SegmentStoreOptions options = disk_options();
    options.slots_per_segment = 8;
    options.budget_bytes = 0;
    boost::filesystem::remove_all(temporary_ / "store");
    open_disk({}, options);
    const auto chain = chain_on_disk(static_cast<int32_t>(10 + offset), 3);
    disk_.reset();
    flip_byte_in_file(offset);
    open_disk({}, options);
    EXPECT_EQ(disk_->contains(chain[1]), offset >= second);  // a wrong description is seen at once
    onboard_from({disk_.get()});
    const auto up = value_of(onboarding_->onboard(chain));
    EXPECT_EQ(up.size(), offset >= second ? 1u : 0u);
    expect_content(up);
    EXPECT_FALSE(disk_->contains(chain[1]));
  }
}

TEST_P(BlockTiersTest, ADiskThatFailsIsReportedAndServingGoesOn) {
  for (const int native : {EIO, ENOSPC}) {
    open_disk();
    DeviceRoute to_disk(*pool_, layout_, *disk_, *transfers_);
    const auto blocks = compute(native, 3);
    file_system_.plan.set(test::Fault::kError, 1, native, /*all_after=*/true);
    EXPECT_EQ(offload(names(blocks), &to_disk).count(BlockOutcome::kFailed), 3u);
    EXPECT_TRUE(disk_health().degraded);
    EXPECT_NE(disk_health().reason.find("injected"), std::string::npos);
    EXPECT_EQ(disk_health().write_errors, 3u);
    EXPECT_EQ(disk_->pool().info().cached, 0);
    EXPECT_EQ(disk_->recovered(), native == EIO ? 0u : 3u);                          // those of the round before
    EXPECT_EQ(offload(names(blocks), &to_disk).count(BlockOutcome::kDegraded), 3u);  // not tried
    clock_.advance(10s);
    EXPECT_EQ(offload(names(blocks), &to_disk).count(BlockOutcome::kFailed), 3u);
    clock_.advance(10s);
    file_system_.plan.clear();
    EXPECT_EQ(offload(names(blocks), &to_disk).count(BlockOutcome::kTransferred), 3u);
    EXPECT_FALSE(disk_health().degraded);
    pipelines_.clear();
  }
}

TEST_P(BlockTiersTest, ABlockThatCannotBeReadIsAMissAndTheOthersAreNot) {
  open_disk();
  const auto chain = chain_on_disk(10, 4);
  onboard_from({disk_.get()});
  file_system_.plan.set(test::Fault::kError, 3);
  const auto up = value_of(onboarding_->onboard(chain));
  file_system_.plan.clear();
  EXPECT_EQ(up.size(), 2u);
  expect_content(up);
  EXPECT_EQ(disk_health().read_errors, 1u);
  EXPECT_FALSE(disk_->contains(chain[2]));
  EXPECT_TRUE(disk_->contains(chain[3]));
}

TEST_P(BlockTiersTest, WithoutStagingMemoryNothingComesUpAndNothingIsDropped) {
  open_disk();
  const auto chain = chain_on_disk(10, 4);
  const auto small = value_of(HostArena::create({.budget_bytes = 4096, .slab_bytes = 4096}));
  {
    const auto transfers = value_of(TransferEngine::create(*device_, *small, {.threads = 1}));
    Onboarding starved(*pool_, layout_, *transfers, {disk_.get()});
    EXPECT_TRUE(value_of(starved.onboard(chain)).empty());
    EXPECT_EQ(starved.info().damaged, 0u);
  }
  onboard_from({disk_.get()});
  EXPECT_EQ(value_of(onboarding_->onboard(chain)).size(), 4u);
}

TEST_P(BlockTiersTest, ADirectoryThatVanishesStopsNothing) {
  open_disk();
  const auto chain = chain_on_disk(10, 3);
  boost::filesystem::remove_all(temporary_ / "store");
  onboard_from({disk_.get()});
  EXPECT_EQ(value_of(onboarding_->onboard(chain)).size(), 3u);  // the open files are still there
  DeviceRoute to_disk(*pool_, layout_, *disk_, *transfers_);
  EXPECT_EQ(offload(names(compute(50, 1)), &to_disk).count(BlockOutcome::kFailed), 1u);
  EXPECT_TRUE(disk_health().degraded);
  pipelines_.clear();
}

TEST_P(BlockTiersTest, WithoutRoomOnTheDiskItIsNotOpened) {
  SegmentStoreOptions options = disk_options();
  options.budget_bytes = uint64_t{1} << 60;
  EXPECT_FAILS(open_segments(options), Code::kResourceExhausted, "room for");
}

}  // namespace
}  // namespace torpor
