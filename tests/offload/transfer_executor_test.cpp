#include "offload/chunk_mover.h"

#include <cstring>
#include <numeric>

#include "allocator/host_device.h"
#include "base/units.h"
#include "offload/disk_tier.h"
#include "offload/host_tier.h"
#include "tests/support/chunk_files.h"
#include "tests/support/faulty_device.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor {
namespace {

using test::FaultyDevice;
using test::value_of;

constexpr uint64_t kBytes = 1 * kMiB;
constexpr uint64_t kChunks = 32;

// A megabyte of device memory in 32 chunks, each of two pieces that lie far apart.
class TransferExecutorTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    device_ = std::make_unique<FaultyDevice>(value_of(make_host_device({.defer_copies = GetParam()})));
    arena_ = value_of(HostArena::create({.slab_bytes = kMiB}));
    executor_ = value_of(TransferExecutor::create(*device_, *arena_, {.threads = 3}));
    mover_ = std::make_unique<ChunkMover>(*executor_);
    address_ = value_of(device_->reserve(kBytes));
    memory_ = value_of(device_->create(kBytes));
    ASSERT_SUCCEEDS(device_->map(address_, memory_));
    ASSERT_SUCCEEDS(device_->set_access(address_, kBytes, Access::kReadWrite));
    for (uint64_t i = 0; i < kBytes; ++i) bytes()[i] = static_cast<std::byte>(i * 2654435761u >> 13);
    for (uint64_t i = 0; i < kChunks; ++i) {
      const uint64_t half = kBytes / kChunks / 2;
      plans_.push_back({.key = {.tag = "t", .region = "r", .index = i},
                        .pieces = {{address_ + i * half, half}, {address_ + kBytes / 2 + i * half, half}}});
    }
    original_.assign(bytes(), bytes() + kBytes);
  }
  void TearDown() override {
    device_->fail_at(0);
    executor_.reset();
    ASSERT_SUCCEEDS(device_->unmap(address_, kBytes));
    ASSERT_SUCCEEDS(device_->release(memory_));
    ASSERT_SUCCEEDS(device_->free_reservation(address_));
  }
  std::byte* bytes() const { return reinterpret_cast<std::byte*>(address_); }  // NOLINT(performance-no-int-to-ptr)
  bool content_is_original() const { return std::memcmp(bytes(), original_.data(), kBytes) == 0; }

  std::unique_ptr<FaultyDevice> device_;
  std::unique_ptr<HostArena> arena_;
  std::unique_ptr<TransferExecutor> executor_;
  std::unique_ptr<ChunkMover> mover_;
  DeviceAddress address_ = 0;
  PhysicalId memory_{};
  std::vector<ChunkPlan> plans_;
  std::vector<std::byte> original_;
};
INSTANTIATE_TEST_SUITE_P(Device, TransferExecutorTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "CopiesLate" : "CopiesAtOnce"; });

TEST_P(TransferExecutorTest, BytesComeBackThroughTheHostTier) {
  HostTier tier(*arena_);
  const auto saved = value_of(mover_->save(plans_, tier));
  std::memset(bytes(), 0, kBytes);
  ASSERT_SUCCEEDS(mover_->restore(saved, plans_, tier));
  EXPECT_TRUE(content_is_original());
  const auto digests = value_of(mover_->digests(plans_));
  for (uint64_t i = 0; i < kChunks; ++i) EXPECT_EQ(digests[i], saved[i].digest);
}

TEST_P(TransferExecutorTest, BytesComeBackThroughAFile) {
  const test::TemporaryDirectory temporary;
  const auto directory = value_of(linux_file_system().open_directory(temporary.path(), false));
  std::vector<SavedChunk> saved;
  {
    const auto tier = value_of(DiskTier::create(*directory, "chunks", {.rank = 0}));
    saved = value_of(mover_->save(plans_, *tier));
  }
  std::memset(bytes(), 0, kBytes);
  const auto tier = value_of(test::open_chunks(*directory, "chunks", 0));
  ASSERT_SUCCEEDS(mover_->restore(saved, plans_, *tier));
  EXPECT_TRUE(content_is_original());
}

TEST_P(TransferExecutorTest, AWrongByteIsFoundBeforeItGoesUpAndItsChunkIsNamed) {
  HostTier tier(*arena_);
  const auto saved = value_of(mover_->save(plans_, tier));
  tier.view(saved[17])[100] ^= std::byte{1};
  EXPECT_FAILS(mover_->restore(saved, plans_, tier), Code::kCorruption, "t/r[17]");
}

TEST_P(TransferExecutorTest, ChunksThatDoNotFitThePlanAreRefused) {
  HostTier tier(*arena_);
  auto saved = value_of(mover_->save(plans_, tier));
  std::swap(saved[0], saved[1]);
  EXPECT_FAILS(mover_->restore(saved, plans_, tier), Code::kIncompatible, "t/r[0]");
  saved.pop_back();
  std::swap(saved[0], saved[1]);
  EXPECT_FAILS(mover_->restore(saved, plans_, tier), Code::kIncompatible, "t/r[31]");
}

// A batch whose copy fails is tried chunk by chunk; a device that goes on failing is an error.
TEST_P(TransferExecutorTest, WhereverTheDeviceStartsToFailItIsAnErrorAndARetryWorks) {
  int failed = 0;
  for (uint64_t n = 1;; ++n) {
    HostTier tier(*arena_);
    device_->fail_at(n, /*sticky=*/true);
    const auto saved = mover_->save(plans_, tier);
    const bool fired = device_->fired();
    device_->fail_at(0);
    if (!fired) break;
    EXPECT_FAILS(saved, Code::kDevice, "injected") << n;
    ++failed;
  }
  EXPECT_GE(failed, 3);
  EXPECT_FALSE(executor_->quarantined());
  HostTier tier(*arena_);
  const auto saved = value_of(mover_->save(plans_, tier));
  device_->fail_at(1);
  EXPECT_SUCCEEDS(mover_->restore(saved, plans_, tier));  // one failure, which trying again mends
  device_->fail_at(1, /*sticky=*/true);
  EXPECT_FAILS(mover_->restore(saved, plans_, tier), Code::kDevice);
  device_->fail_at(0);
  std::memset(bytes(), 0, kBytes);
  ASSERT_SUCCEEDS(mover_->restore(saved, plans_, tier));
  EXPECT_TRUE(content_is_original());
}

TEST_P(TransferExecutorTest, AnErrorThatIsProvenDrainedAllowsARetry) {
  HostTier tier(*arena_);
  device_->drain_as(Drain::kDrainedWithError);
  EXPECT_FAILS(mover_->save(plans_, tier), Code::kDevice);
  device_->drain_as(Drain::kCompleted);
  EXPECT_FALSE(executor_->quarantined());
  HostTier second(*arena_);
  EXPECT_SUCCEEDS(mover_->save(plans_, second));
}

TEST_P(TransferExecutorTest, AfterAnUnprovenCopyNothingMoreIsDoneAndItsMemoryIsKept) {
  HostTier tier(*arena_);
  device_->drain_as(Drain::kUnproven);
  EXPECT_FALSE(mover_->digests(plans_).has_value());
  device_->drain_as(Drain::kCompleted);
  EXPECT_TRUE(executor_->quarantined());
  EXPECT_GT(mover_->counts()[static_cast<size_t>(BlockOutcome::kUnproven)], 0u);
  const uint64_t kept = arena_->info().used_bytes;
  EXPECT_GT(kept, 0u);
  executor_->release_staging();
  EXPECT_FAILS(mover_->save(plans_, tier), Code::kDevice, "quarantined");
  executor_.reset();
  EXPECT_EQ(arena_->info().used_bytes, kept);
}

TEST_P(TransferExecutorTest, EveryChunkIsCountedByItsOutcome) {
  HostTier tier(*arena_);
  const auto saved = value_of(mover_->save(plans_, tier));
  EXPECT_EQ(mover_->counts()[static_cast<size_t>(BlockOutcome::kTransferred)], kChunks);
  tier.view(saved[0])[0] ^= std::byte{1};
  EXPECT_FALSE(mover_->restore(saved, plans_, tier).has_value());
  const OutcomeCounts& counts = mover_->counts();
  EXPECT_GE(counts[static_cast<size_t>(BlockOutcome::kFailed)], 1u);
  EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), uint64_t{0}), 2 * kChunks);
}

TEST_P(TransferExecutorTest, NothingToDoIsDone) {
  HostTier tier(*arena_);
  EXPECT_TRUE(value_of(mover_->save({}, tier)).empty());
  EXPECT_SUCCEEDS(mover_->restore({}, {}, tier));
}

TEST(TransferExecutor, ANegativeThreadCountIsRefused) {
  const auto device = value_of(make_host_device());
  const auto arena = value_of(HostArena::create());
  EXPECT_FAILS(TransferExecutor::create(*device, *arena, {.threads = -1}), Code::kInvalidArgument);
}

}  // namespace
}  // namespace torpor
