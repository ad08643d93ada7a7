// SPDX-License-Identifier: Apache-2.0
// Small pieces in pinned memory, copied by a kernel.
#include <random>

#include <gtest/gtest.h>

#include "allocator/cuda/cuda_device.h"
#include "allocator/cuda/gather.h"
#include "allocator/host_arena.h"
#include "base/units.h"
#include "tests/support/fake_cuda_driver.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::FakeCuda;
using test::value_of;
using Lasting = FakeCuda::Lasting;

constexpr std::byte kImage[16] = {};  // the fake driver loads any

// A device that gathers pieces of less than 16 KiB, a mapped region, and pinned memory.
class CudaGatherTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kBytes = 4 * kMiB;
  CudaGatherTest()
      : device_(value_of(make_cuda_device(fake_.driver(), {.gather_below_bytes = 16 * kKiB, .gather_image = kImage}))),
        arena_(value_of(HostArena::create({.slab_bytes = 2 * kBytes, .pin_for = device_.get()}))),
        host_(value_of(arena_->allocate(kBytes))),
        stream_(value_of(device_->create_stream())),
        address_(value_of(device_->reserve(kBytes))),
        id_(value_of(device_->create(kBytes))) {
    EXPECT_SUCCEEDS(device_->map(address_, id_));
    EXPECT_SUCCEEDS(device_->set_access(address_, kBytes, Access::kReadWrite));
  }
  ~CudaGatherTest() override {
    EXPECT_SUCCEEDS(device_->unmap(address_, kBytes));
    EXPECT_SUCCEEDS(device_->release(id_));
    EXPECT_SUCCEEDS(device_->free_reservation(address_));
    host_ = {};
    arena_.reset();
    device_.reset();
    EXPECT_EQ(fake_.left(), "");
  }
  void copy(Direction direction, const std::vector<Copy>& copies) {
    ASSERT_SUCCEEDS(device_->copy_async(stream_, direction, copies));
    ASSERT_EQ(device_->wait(value_of(device_->record(stream_))).drain, Drain::kCompleted);
  }
  uint64_t launches() { return fake_.counts()["cuLaunchKernel"]; }
  FakeCuda fake_;
  std::unique_ptr<DeviceMemory> device_;
  std::unique_ptr<HostArena> arena_;
  HostArena::Span host_;
  StreamId stream_;
  DeviceAddress address_;
  PhysicalId id_;
};

TEST_F(CudaGatherTest, PiecesOfAnySizeAndAlignmentGoThereAndBack) {
  std::mt19937 random(3);
  std::vector<Copy> copies;
  uint64_t device_at = 0;
  uint64_t host_at = 0;
  while (copies.size() < 2 * cuda::kGatherPieces + 1) {  // three launches
    const uint64_t bytes = copies.size() % 3 == 0 ? 1 + random() % 40 : 1 + random() % 2500;
    copies.push_back({address_ + device_at, host_.bytes().data() + host_at, bytes});
    device_at += bytes + (copies.size() % 2 == 0 ? random() % 40 : 0);
    host_at += bytes + random() % 3;
  }
  ASSERT_LE(std::max(device_at, host_at), kBytes);
  std::shuffle(copies.begin(), copies.end(), random);
  std::vector<std::byte> content(host_.bytes().size());
  for (std::byte& byte : content) byte = static_cast<std::byte>(random());
  std::copy(content.begin(), content.end(), host_.bytes().begin());
  copy(Direction::kHostToDevice, copies);
  EXPECT_EQ(launches(), 3u);
  std::fill(host_.bytes().begin(), host_.bytes().end(), std::byte{0});
  copy(Direction::kDeviceToHost, copies);
  EXPECT_EQ(launches(), 6u);
  std::vector<std::byte> wanted(content.size());
  for (const Copy& piece : copies) {
    const auto at = static_cast<size_t>(piece.host - host_.bytes().data());
    std::copy_n(content.begin() + static_cast<std::ptrdiff_t>(at), piece.bytes,
                wanted.begin() + static_cast<std::ptrdiff_t>(at));
  }
  EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), host_.bytes().begin()));
  // What the engines read is what the kernel wrote.
  std::vector<std::byte> whole(kBytes);
  copy(Direction::kDeviceToHost, {{address_, whole.data(), kBytes}});
  for (const Copy& piece : copies)
    ASSERT_TRUE(std::equal(whole.data() + (piece.device - address_),
                           whole.data() + (piece.device - address_) + piece.bytes, piece.host));
}

TEST_F(CudaGatherTest, OnlySmallPiecesInPinnedMemoryGoThatWay) {
  std::vector<std::byte> unpinned(kMiB);
  copy(Direction::kDeviceToHost, {{address_, unpinned.data(), 512}, {address_ + 512, unpinned.data() + 512, 512}});
  copy(Direction::kDeviceToHost, {{address_, host_.bytes().data(), 512}});  // one
  copy(Direction::kDeviceToHost, {{address_, host_.bytes().data(), 16 * kKiB},
                                  {address_ + kMiB, host_.bytes().data() + kMiB, 16 * kKiB}});  // not small
  EXPECT_EQ(launches(), 0u);
  copy(Direction::kDeviceToHost,
       {{address_, host_.bytes().data(), 512}, {address_ + kMiB, host_.bytes().data() + kMiB, 16 * kKiB}});
  EXPECT_EQ(launches(), 1u);
  std::vector<Copy> partly = {{address_, host_.bytes().data(), 512}, {address_ + 512, unpinned.data(), 512}};
  copy(Direction::kDeviceToHost, partly);
  EXPECT_EQ(launches(), 1u);
}

TEST_F(CudaGatherTest, NoPieceGoesThatWayWhileTheProcessorsAreAtWork) {
  const std::vector<Copy> small = {{address_, host_.bytes().data(), 512},
                                   {address_ + kMiB, host_.bytes().data() + kMiB, 512}};
  ASSERT_SUCCEEDS(device_->copy_async(stream_, Direction::kDeviceToHost, small, CopyBy::kEngines));
  ASSERT_EQ(device_->wait(value_of(device_->record(stream_))).drain, Drain::kCompleted);
  EXPECT_EQ(launches(), 0u);
}

TEST(CudaGather, IsThereUnlessItIsNotWanted) {
  FakeCuda fake;
  CudaDeviceInfo info;
  ASSERT_TRUE(make_cuda_device(fake.driver(), {.gather_image = kImage}, &info));
  EXPECT_TRUE(info.gathers);
  CudaDeviceInfo without;
  ASSERT_TRUE(make_cuda_device(fake.driver(), {.gather_below_bytes = 0, .gather_image = kImage}, &without));
  EXPECT_FALSE(without.gathers);
  EXPECT_TRUE(without.notes.empty());
}

TEST(CudaGather, IsInThisBuildsImageOrSaidToBeMissing) {
  FakeCuda fake;
  CudaDeviceInfo info;
  ASSERT_TRUE(make_cuda_device(fake.driver(), {.gather_below_bytes = kKiB}, &info));
  EXPECT_EQ(info.gathers, !cuda::gather_image().empty());
  EXPECT_EQ(info.notes.size(), info.gathers ? 0u : 1u);
  FakeCuda old({.batched_copies = false});  // CUDA 12.0
  CudaDeviceInfo without;
  ASSERT_TRUE(make_cuda_device(old.driver(), {.gather_below_bytes = kKiB, .gather_image = kImage}, &without));
  EXPECT_FALSE(without.gathers);
  ASSERT_EQ(without.notes.size(), 1u);
  EXPECT_NE(without.notes[0].find("12.1"), std::string::npos);
}

TEST(CudaGather, AKernelThatCannotBeLoadedIsSaidAndNothingIsLeft) {
  for (const char* const function : {"cuModuleLoadData", "cuModuleGetFunction"}) {
    FakeCuda fake;
    CudaDeviceInfo info;
    std::unique_ptr<DeviceMemory> device;
    for (uint64_t nth = 1; fake.failed_function() != function; ++nth) {
      ASSERT_LT(nth, 40u) << function;
      device.reset();
      fake.fail(nth, CUDA_ERROR_NO_BINARY_FOR_GPU, Lasting::kOnce);
      if (auto made = make_cuda_device(fake.driver(), {.gather_below_bytes = kKiB, .gather_image = kImage}, &info))
        device = std::move(*made);
    }
    EXPECT_NE(device, nullptr);
    EXPECT_FALSE(info.gathers);
    EXPECT_EQ(info.notes.size(), 1u);
    device.reset();
    EXPECT_EQ(fake.left(), "");
  }
}

}  // namespace
}  // namespace torpor
