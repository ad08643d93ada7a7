// SPDX-License-Identifier: Apache-2.0
// While memory of one region is created or zeroed by a driver that takes its time, chunks go up into another that is
// there; and the other way round. While host memory is pinned, chunks go down into what is there.
#include <cstring>
#include <future>
#include <thread>

#include "allocator/cuda/cuda_device.h"
#include "base/units.h"
#include "engine/region_mapper.h"
#include "offload/blocking_transfers.h"
#include "offload/host_tier.h"
#include "offload/transfer_engine.h"
#include "tests/support/fake_cuda_driver.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::FakeCuda;
using test::value_of;
using namespace std::chrono_literals;

constexpr uint64_t kBytes = 4 * kMiB;

class MappingOverlapTest : public ::testing::Test {
 protected:
  MappingOverlapTest()
      : device_(value_of(make_cuda_device(fake_.driver(), {}))),
        allocator_(value_of(SleepAllocator::create(*device_, {.handle_bytes = 2 * kMiB}))),
        arena_(value_of(HostArena::create({.slab_bytes = 2 * kMiB}))),
        transfers_(value_of(TransferEngine::create(*device_, *arena_, {.threads = 1}))),
        blocking_(*transfers_),
        backup_(*arena_) {
    for (const char* const name : {"a", "b"}) {
      regions_.push_back(value_of(allocator_->allocate("weights", name, kBytes)));
      plans_.push_back({.key = {.tag = "weights", .region = name}, .pieces = {{regions_.back(), kBytes}}});
    }
    saved_ = value_of(blocking_.save(plans_, backup_));
    EXPECT_SUCCEEDS(allocator_->detach(tags_));
    EXPECT_SUCCEEDS(allocator_->begin_attach(tags_));
  }
  Status restore(size_t region) {
    return blocking_.restore(std::span(saved_).subspan(region, 1), std::span(plans_).subspan(region, 1), backup_);
  }
  FakeCuda fake_;
  std::unique_ptr<DeviceMemory> device_;
  std::unique_ptr<SleepAllocator> allocator_;
  std::unique_ptr<HostArena> arena_;
  std::unique_ptr<TransferEngine> transfers_;
  BlockingTransfers blocking_;
  HostTier backup_;
  const std::vector<std::string> tags_{"weights"};
  std::vector<DeviceAddress> regions_;
  std::vector<ChunkPlan> plans_;
  std::vector<SavedChunk> saved_;
};

class WhatARegionWaitsFor : public MappingOverlapTest, public ::testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Calls, WhatARegionWaitsFor, ::testing::Values("cuMemCreate", "cuMemsetD8Async"),
                         [](const auto& each) { return std::string(each.param); });

TEST_P(WhatARegionWaitsFor, ChunksGoUpMeanwhile) {
  ASSERT_SUCCEEDS(allocator_->attach_region(regions_[0]));
  fake_.hold(GetParam());  // of the second region
  RegionMapper mapper(*allocator_, regions_);
  ASSERT_SUCCEEDS(mapper.wait(1));
  fake_.wait_until_held();
  std::future<Status> first = std::async(std::launch::async, [&] { return restore(0); });
  EXPECT_EQ(first.wait_for(20s), std::future_status::ready) << "copies wait for the mapping";
  fake_.resume();
  EXPECT_SUCCEEDS(first.get());
  ASSERT_SUCCEEDS(mapper.wait(2));
  EXPECT_SUCCEEDS(restore(1));
  EXPECT_SUCCEEDS(allocator_->finish_restore(tags_));
}

TEST_F(MappingOverlapTest, TheNextRegionIsMappedWhileACopyBlocks) {
  ASSERT_SUCCEEDS(allocator_->attach_region(regions_[0]));
  fake_.hold("cuMemcpyHtoDAsync");
  std::future<Status> first = std::async(std::launch::async, [&] { return restore(0); });
  fake_.wait_until_held();
  RegionMapper mapper(*allocator_, regions_);
  std::future<Status> mapped = std::async(std::launch::async, [&] { return mapper.wait(2); });
  EXPECT_EQ(mapped.wait_for(20s), std::future_status::ready) << "the mapping waits for copies";
  fake_.resume();
  EXPECT_SUCCEEDS(mapped.get());
  EXPECT_SUCCEEDS(first.get());
  EXPECT_SUCCEEDS(restore(1));
  EXPECT_SUCCEEDS(allocator_->finish_restore(tags_));
}

// For who must repeat the order of the device's calls: a replay, whose faults count them.
TEST_F(MappingOverlapTest, WithoutAThreadAllIsMappedBeforeAnythingIsCopied) {
  fake_.hold("cuMemsetD8Async");  // so long that a thread of its own could not have ended
  std::future<void> later = std::async(std::launch::async, [&] {
    fake_.wait_until_held();
    std::this_thread::sleep_for(50ms);
    fake_.resume();
  });
  RegionMapper mapper(*allocator_, regions_, /*own_thread=*/false);
  EXPECT_TRUE(mapper.finished());
  later.get();
  ASSERT_SUCCEEDS(mapper.wait(2));
  for (size_t region = 0; region < 2; ++region) EXPECT_SUCCEEDS(restore(region));
  EXPECT_SUCCEEDS(allocator_->finish_restore(tags_));
}

TEST(FirstSleepOverlap, ChunksGoDownWhileMoreHostMemoryIsPinned) {
  FakeCuda fake;
  const auto device = value_of(make_cuda_device(fake.driver(), {}));
  const auto allocator = value_of(SleepAllocator::create(*device, {.handle_bytes = 2 * kMiB}));
  const auto arena = value_of(HostArena::create({.slab_bytes = kMiB, .piece_bytes = kMiB, .pin_for = device.get()}));
  const auto transfers = value_of(TransferEngine::create(*device, *arena, {.threads = 1}));
  std::vector<ChunkPlan> plans;
  std::vector<DeviceAddress> regions;
  for (const char* const name : {"a", "b", "c"}) {
    regions.push_back(value_of(allocator->allocate("weights", name, kMiB - 4 * kPage)));
    plans.push_back({.key = {.tag = "weights", .region = name}, .pieces = {{regions.back(), kMiB - 4 * kPage}}});
  }
  fake.hold("cuMemHostRegister", 2);  // that of a third piece, after the arena's first slab
  HostTier backup(*arena);
  std::future<Result<std::vector<SavedChunk>>> saved =
      std::async(std::launch::async, [&] { return BlockingTransfers(*transfers).save(plans, backup); });
  fake.wait_until_held();
  const auto down = [&] { return fake.counts()["cuMemcpyDtoHAsync"] + fake.counts()["cuMemcpyBatchAsync"]; };
  for (int i = 0; i < 20'000 && down() == 0; ++i) std::this_thread::sleep_for(1ms);
  EXPECT_GT(down(), 0u) << "copies wait for memory that they do not need yet";
  fake.resume();
  EXPECT_EQ(value_of(saved.get()).size(), 3u);
  for (const DeviceAddress region : regions) EXPECT_SUCCEEDS(allocator->free(region));
}

}  // namespace
}  // namespace torpor
