// SPDX-License-Identifier: Apache-2.0
#include "allocator/cuda/cuda_device.h"

#include <optional>
#include <random>
#include <thread>

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "allocator/cuda/gather.h"
#include "allocator/host_arena.h"
#include "allocator/sleep_allocator.h"
#include "base/units.h"
#include "tests/contract/device_memory_contract.h"
#include "tests/support/fake_cuda_driver.h"

namespace torpor {
namespace {

using test::DeviceMemoryContract;
using test::FakeCuda;
using test::FakeCudaOptions;
using test::value_of;
using Lasting = FakeCuda::Lasting;

constexpr uint64_t kEntered = 2;  // calls before a method's own: the context, and the mode of captures

// Over the fake driver; the one before ends, and with it fails the test that misused it.
std::unique_ptr<DeviceMemory> over_fake(FakeCudaOptions options) {
  static std::optional<FakeCuda> fake;
  fake.emplace(options);
  return value_of(make_cuda_device(fake->driver(), {}));
}
std::unique_ptr<DeviceMemory> batched() { return over_fake({}); }
std::unique_ptr<DeviceMemory> one_by_one() {
  return over_fake({.granularity_bytes = 64 * kKiB, .batched_copies = false, .seed = 2});
}
std::unique_ptr<DeviceMemory> other_addresses() { return over_fake({.host_pointers = false, .seed = 3}); }

INSTANTIATE_TEST_SUITE_P(FakeCuda, DeviceMemoryContract, ::testing::Values(batched, one_by_one, other_addresses));

// The same on real ones, where there are any.
std::vector<test::DeviceFactory> real_devices() {
  if (!cuda_driver()) return {};
  return {[] { return value_of(make_cuda_device()); },
          [] { return value_of(make_cuda_device({.gather_below_bytes = kMiB})); }};
}
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DeviceMemoryContract);
INSTANTIATE_TEST_SUITE_P(Cuda, DeviceMemoryContract, ::testing::ValuesIn(real_devices()));

TEST(CudaDriver, WhereThereIsNoneTheErrorSaysWhatToInstall) {
  const Result<const CudaDriver*> driver = cuda_driver();
  if (driver) GTEST_SKIP() << "there is a driver here";
  EXPECT_EQ(driver.error().code, Code::kUnsupported);
  EXPECT_NE(driver.error().next_step, "");
  EXPECT_FAILS(make_cuda_device(), Code::kUnsupported);
}

TEST(CudaDevice, SaysWhatItIs) {
  FakeCuda fake({.devices = 2, .attributes = false});
  CudaDeviceInfo info;
  const auto device =
      value_of(make_cuda_device(fake.driver(), {.ordinal = 1, .rdma = true, .exportable = true}, &info));
  EXPECT_EQ(device->kind(), "cuda:1");
  EXPECT_EQ(info.name, "Fake GPU");
  EXPECT_EQ(info.driver_version, 12080);
  EXPECT_TRUE(info.batched_copies);
  ASSERT_EQ(info.notes.size(), 2u);  // what was asked for and is not there
  EXPECT_NE(info.notes[0].find("RDMA"), std::string::npos);
  EXPECT_EQ(device->info().capacity_bytes, kGiB);
}

TEST(CudaDevice, OnesThatDoNotExistOrCannotAreRefusedAndNothingIsLeft) {
  FakeCuda fake({.devices = 2, .virtual_memory = false});
  EXPECT_FAILS(make_cuda_device(fake.driver(), {.ordinal = 2}), Code::kUnsupported, "GPU 2");
  EXPECT_FAILS(make_cuda_device(fake.driver(), {.ordinal = -1}), Code::kUnsupported);
  EXPECT_FAILS(make_cuda_device(fake.driver(), {}), Code::kUnsupported, "virtual memory management");
  EXPECT_EQ(fake.left(), "");
}

TEST(CudaDevice, TheCallersContextIsPutBackWhateverHappens) {
  FakeCuda fake({.devices = 2});
  const auto device = value_of(make_cuda_device(fake.driver(), {.ordinal = 1}));
  CUcontext own = nullptr;
  ASSERT_EQ(fake.driver().cuDevicePrimaryCtxRetain(&own, 0), CUDA_SUCCESS);
  ASSERT_EQ(fake.driver().cuCtxPushCurrent(own), CUDA_SUCCESS);
  const DeviceAddress address = value_of(device->reserve(device->granularity()));
  EXPECT_FAILS(device->create(2 * kGiB), Code::kResourceExhausted);
  const PhysicalId id = value_of(device->create(device->granularity()));  // on its own device, or the fake complains
  ASSERT_SUCCEEDS(device->map(address, id));
  ASSERT_SUCCEEDS(device->set_access(address, device->granularity(), Access::kReadWrite));
  std::thread([&] { EXPECT_TRUE(device->info().used_bytes.has_value()); }).join();  // a thread without a context
  ASSERT_SUCCEEDS(device->unmap(address, device->granularity()));
  ASSERT_SUCCEEDS(device->release(id));
  ASSERT_SUCCEEDS(device->free_reservation(address));
  CUcontext current = nullptr;
  EXPECT_EQ(fake.contexts_of_this_thread(), 1u);
  ASSERT_EQ(fake.driver().cuCtxPopCurrent(&current), CUDA_SUCCESS);
  EXPECT_EQ(current, own);
  ASSERT_EQ(fake.driver().cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS);
}

TEST(CudaDevice, AnotherProcessMayHoldTheMemory) {
  constexpr uint64_t kMost = 16 * kMiB;
  constexpr uint64_t kUnit = 2 * kMiB;
  FakeCuda fake({.memory_bytes = kMost});
  const auto device = value_of(make_cuda_device(fake.driver(), {}));
  CUcontext own = nullptr;
  ASSERT_EQ(fake.driver().cuDevicePrimaryCtxRetain(&own, 0), CUDA_SUCCESS);
  ASSERT_EQ(fake.driver().cuCtxPushCurrent(own), CUDA_SUCCESS);
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  CUmemGenericAllocationHandle other = 0;
  ASSERT_EQ(fake.driver().cuMemCreate(&other, kMost - kUnit, &properties, 0), CUDA_SUCCESS);
  EXPECT_FAILS(device->create(2 * kUnit), Code::kResourceExhausted, "free device memory");
  EXPECT_EQ(*device->info().used_bytes - device->info().physical_bytes, kMost - kUnit);  // what is not torpor's
  ASSERT_EQ(fake.driver().cuMemRelease(other), CUDA_SUCCESS);
  const PhysicalId id = value_of(device->create(2 * kUnit));
  ASSERT_SUCCEEDS(device->release(id));
  CUcontext popped = nullptr;
  ASSERT_EQ(fake.driver().cuCtxPopCurrent(&popped), CUDA_SUCCESS);
  ASSERT_EQ(fake.driver().cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS);
}

// A stream, and a mapped region of four physical pieces.
class CudaDeviceTest : public ::testing::Test {
 protected:
  CudaDeviceTest()
      : device_(value_of(make_cuda_device(fake_.driver(), {}))),
        unit_(device_->granularity()),
        stream_(value_of(device_->create_stream())),
        address_(value_of(device_->reserve(4 * unit_))) {
    for (uint64_t i = 0; i < 4; ++i) {
      ids_.push_back(value_of(device_->create(unit_)));
      EXPECT_SUCCEEDS(device_->map(address_ + i * unit_, ids_.back()));
    }
    EXPECT_SUCCEEDS(device_->set_access(address_, 4 * unit_, Access::kReadWrite));
  }
  ~CudaDeviceTest() override {
    fake_.heal();
    EXPECT_SUCCEEDS(device_->unmap(address_, 4 * unit_));
    for (const PhysicalId id : ids_) EXPECT_SUCCEEDS(device_->release(id));
    EXPECT_SUCCEEDS(device_->free_reservation(address_));
    EXPECT_SUCCEEDS(device_->destroy_stream(stream_));
    device_.reset();
    EXPECT_EQ(fake_.left(), "");
  }
  DrainResult copy(Direction direction, std::vector<std::byte>& host) {
    std::vector<Copy> copies;
    for (uint64_t at = 0; at < host.size(); at += unit_) copies.push_back({address_ + at, host.data() + at, unit_});
    EXPECT_SUCCEEDS(device_->copy_async(stream_, direction, copies));
    return device_->wait(value_of(device_->record(stream_)));
  }
  FakeCuda fake_;
  std::unique_ptr<DeviceMemory> device_;
  uint64_t unit_;
  StreamId stream_;
  DeviceAddress address_;
  std::vector<PhysicalId> ids_;
};

TEST_F(CudaDeviceTest, AnUnmapThatFailsHalfWayIsUndone) {
  std::vector<std::byte> content(4 * unit_, std::byte{7});
  ASSERT_EQ(copy(Direction::kHostToDevice, content).drain, Drain::kCompleted);
  fake_.fail(kEntered + 3, CUDA_ERROR_UNKNOWN, Lasting::kForever);  // two unmaps, then the third for ever
  const Status done = device_->unmap(address_, 4 * unit_);
  EXPECT_EQ(fake_.failed_function(), "cuMemUnmap");
  ASSERT_FALSE(done);
  EXPECT_FALSE(done.error().state_changed);
  fake_.heal();
  std::vector<std::byte> read(4 * unit_);
  ASSERT_EQ(copy(Direction::kDeviceToHost, read).drain, Drain::kCompleted);
  EXPECT_EQ(read, content);
}

TEST_F(CudaDeviceTest, AWaitThatFailsIsDecidedByTheStream) {
  std::vector<std::byte> host(4 * unit_);
  const auto wait_failing = [&](CUresult code, Lasting lasting) {
    std::vector<Copy> copies = {{address_, host.data(), unit_}};
    EXPECT_SUCCEEDS(device_->copy_async(stream_, Direction::kDeviceToHost, copies));
    const EventId event = value_of(device_->record(stream_));
    fake_.fail(kEntered + 1, code, lasting);  // the event
    const DrainResult drained = device_->wait(event);
    EXPECT_EQ(fake_.failed_function(), "cuEventSynchronize");
    fake_.heal();
    return drained;
  };
  const DrainResult once = wait_failing(CUDA_ERROR_UNKNOWN, Lasting::kOnce);
  EXPECT_EQ(once.drain, Drain::kDrainedWithError);
  EXPECT_EQ(once.error.native, CUDA_ERROR_UNKNOWN);
  const DrainResult lasting = wait_failing(CUDA_ERROR_UNKNOWN, Lasting::kForever);
  EXPECT_EQ(lasting.drain, Drain::kDrainedWithError);  // the event never tells, the stream does
  fake_.fail(1, CUDA_ERROR_UNKNOWN, Lasting::kSticky);
  EXPECT_EQ(device_->drain(stream_).drain, Drain::kUnproven);
  fake_.heal();
  EXPECT_EQ(device_->drain(stream_).drain, Drain::kCompleted);  // now it is proven
}

TEST_F(CudaDeviceTest, WhatAStickyErrorMayHaveTakenDownIsNotTakenDownAgain) {
  const PhysicalId id = value_of(device_->create(unit_));
  for (const auto& [code, calls] : {std::pair(CUDA_ERROR_ILLEGAL_ADDRESS, 1u), std::pair(CUDA_ERROR_UNKNOWN, 2u)}) {
    const uint64_t before = fake_.counts()["cuMemRelease"];
    fake_.fail(kEntered + 1, code, Lasting::kForever);  // the release
    EXPECT_FAILS(device_->release(id), Code::kDevice);
    EXPECT_EQ(fake_.failed_function(), "cuMemRelease");
    EXPECT_EQ(fake_.counts()["cuMemRelease"] - before, calls);
  }
  fake_.heal();
  EXPECT_SUCCEEDS(device_->release(id));
}

TEST_F(CudaDeviceTest, WhatIsNotProvenToBeZeroedIsNotUnmappedUntilItIs) {
  const DeviceAddress address = value_of(device_->reserve(unit_));
  const PhysicalId id = value_of(device_->create(unit_));
  ASSERT_SUCCEEDS(device_->map(address, id));
  fake_.fail(kEntered + 3, CUDA_ERROR_LAUNCH_FAILED, Lasting::kSticky);  // access, memset, then its wait
  EXPECT_FAILS(device_->set_access(address, unit_, Access::kReadWrite), Code::kDevice, "zeroing");
  EXPECT_EQ(fake_.failed_function(), "cuStreamSynchronize");
  fake_.fail(kEntered + 1, CUDA_ERROR_LAUNCH_FAILED, Lasting::kSticky);
  EXPECT_FAILS(device_->unmap(address, unit_), Code::kDevice);
  fake_.heal();
  EXPECT_SUCCEEDS(device_->unmap(address, unit_));
  EXPECT_SUCCEEDS(device_->release(id));
  EXPECT_SUCCEEDS(device_->free_reservation(address));
}

TEST_F(CudaDeviceTest, TheArenaIsPinnedAndUnpinnedBeforeItGoes) {
  {
    const auto arena = value_of(HostArena::create({.slab_bytes = 2 * kMiB, .pin_for = device_.get()}));
    const auto span = value_of(arena->allocate(kMiB));
    EXPECT_NE(fake_.left().find("1 pinned"), std::string::npos);
    EXPECT_EQ(arena->info().unpinned_bytes, 0u);
  }
  EXPECT_EQ(fake_.left().find("pinned"), std::string::npos);
}

TEST(CudaDevice, TheArenaAsksForMemoryOfItsNumaNode) {
  FakeCuda fake({.host_numa_node = 0});
  const auto device = value_of(make_cuda_device(fake.driver(), {}));
  const auto arena = value_of(HostArena::create({.slab_bytes = 2 * kMiB, .pin_for = device.get()}));
  const auto span = value_of(arena->allocate(kMiB));
  int policy = -1;
  unsigned long nodes[16] = {};
  if (::syscall(SYS_get_mempolicy, &policy, nodes, 8 * sizeof nodes, span.bytes().data(), MPOL_F_ADDR) != 0)
    GTEST_SKIP() << "this kernel knows no NUMA";
  EXPECT_EQ(policy, MPOL_PREFERRED);
  EXPECT_EQ(nodes[0], 1u);
  EXPECT_EQ(arena->info().numa_node, 0);
}

TEST(CudaDevice, ANumaNodeThatTheSystemDoesNotHaveIsDoneWithout) {
  for (const int node : {1023, 5000}) {
    FakeCuda fake({.host_numa_node = node});
    const auto device = value_of(make_cuda_device(fake.driver(), {}));
    const auto arena = value_of(HostArena::create({.slab_bytes = 2 * kMiB, .pin_for = device.get()}));
    EXPECT_FALSE(value_of(arena->allocate(kMiB)).empty());
    EXPECT_EQ(arena->info().numa_node, std::nullopt);
  }
}

TEST_F(CudaDeviceTest, AnArenaThatCannotBePinnedWorksAndSaysSo) {
  const auto arena = value_of(HostArena::create({.slab_bytes = 2 * kMiB, .pin_for = device_.get()}));
  fake_.fail(kEntered + 1, CUDA_ERROR_OUT_OF_MEMORY, Lasting::kOnce);
  {
    const auto span = value_of(arena->allocate(kMiB));
    EXPECT_EQ(fake_.failed_function(), "cuMemHostRegister");
    EXPECT_EQ(arena->info().unpinned_bytes, 2 * kMiB);
  }
  EXPECT_EQ(arena->trim(), 2 * kMiB);
  EXPECT_EQ(arena->info().unpinned_bytes, 0u);
}

// SGLang 36798: host memory is registered in pieces, and a page that lay in two of them was refused by the driver.
TEST(CudaDevice, ACopyMayCrossRegistrationsOfHostMemory) {
  for (const uint64_t gather_below : {uint64_t{0}, kMiB}) {
    FakeCuda fake({.granularity_bytes = 2 * kMiB});
    constexpr std::byte image[16] = {};
    const auto device = value_of(make_cuda_device(
        fake.driver(), {.gather_below_bytes = gather_below, .gather_image = image, .pin_step_bytes = 8 * kKiB}));
    const auto arena = value_of(HostArena::create({.slab_bytes = 2 * kMiB, .pin_for = device.get()}));
    const auto host = value_of(arena->allocate(kMiB)).bytes();
    const DeviceAddress address = value_of(device->reserve(2 * kMiB));
    const PhysicalId id = value_of(device->create(2 * kMiB));
    ASSERT_SUCCEEDS(device->map(address, id));
    ASSERT_SUCCEEDS(device->set_access(address, 2 * kMiB, Access::kReadWrite));
    const StreamId stream = value_of(device->create_stream());
    std::vector<std::byte> content(60 * kKiB);
    for (size_t i = 0; i < content.size(); ++i) content[i] = static_cast<std::byte>(i * 131 >> 3);
    std::copy(content.begin(), content.end(), host.data() + 100);
    const std::vector<Copy> up = {{address + 5, host.data() + 100, 20 * kKiB},
                                  {address + 5 + 20 * kKiB, host.data() + 100 + 20 * kKiB, 40 * kKiB}};
    ASSERT_SUCCEEDS(device->copy_async(stream, Direction::kHostToDevice, up));
    std::vector<std::byte> read(content.size());
    const Copy down{address + 5, read.data(), read.size()};
    ASSERT_SUCCEEDS(device->copy_async(stream, Direction::kDeviceToHost, {&down, 1}));
    ASSERT_EQ(device->drain(stream).drain, Drain::kCompleted);
    EXPECT_EQ(read, content);
    EXPECT_EQ(fake.counts()["cuLaunchKernel"] > 0, gather_below > 0);
    ASSERT_SUCCEEDS(device->unmap(address, 2 * kMiB));
    ASSERT_SUCCEEDS(device->release(id));
    ASSERT_SUCCEEDS(device->free_reservation(address));
    ASSERT_SUCCEEDS(device->destroy_stream(stream));
  }
}

TEST_F(CudaDeviceTest, WhatCouldNotBeUnpinnedIsTriedAgainAndNothingElse) {
  const auto device = value_of(make_cuda_device(fake_.driver(), {.pin_step_bytes = kMiB}));
  std::vector<std::byte> memory(4 * kMiB);
  ASSERT_SUCCEEDS(device->pin_host(memory));
  fake_.fail(kEntered + 2, CUDA_ERROR_ILLEGAL_ADDRESS, Lasting::kOnce);  // the second, and all after it
  EXPECT_FAILS(device->unpin_host(memory), Code::kDevice);
  EXPECT_EQ(fake_.failed_function(), "cuMemHostUnregister");
  fake_.heal();
  EXPECT_NE(fake_.left().find("3 pinned"), std::string::npos);
  EXPECT_SUCCEEDS(device->unpin_host(memory));
  EXPECT_EQ(fake_.left().find("pinned"), std::string::npos);
}

TEST_F(CudaDeviceTest, MemoryThatCannotBeUnpinnedStays) {
  const auto arena = value_of(HostArena::create({.slab_bytes = 2 * kMiB, .pin_for = device_.get()}));
  (void)value_of(arena->allocate(kMiB));
  fake_.fail(kEntered + 1, CUDA_ERROR_UNKNOWN, Lasting::kForever);
  EXPECT_EQ(arena->trim(), 0u);
  EXPECT_EQ(fake_.failed_function(), "cuMemHostUnregister");
  EXPECT_EQ(arena->info().held_bytes, 2 * kMiB);
  fake_.heal();
}

// The driver unmaps the second piece of a region neither once nor twice, and will not map the first again.
TEST(SleepAllocatorOnCuda, ARegionThatIsHalfUnmappedIsBrokenAndCanBeFreedLater) {
  uint64_t points = 0;
  for (uint64_t nth = 1;; ++nth) {
    SCOPED_TRACE(nth);
    FakeCuda fake;
    const auto device = value_of(make_cuda_device(fake.driver(), {}));
    const uint64_t unit = device->granularity();
    const auto allocator = value_of(SleepAllocator::create(*device, {.handle_bytes = unit}));
    const DeviceAddress region = value_of(allocator->allocate("weights", "a", 3 * unit));
    fake.fail(nth, CUDA_ERROR_UNKNOWN, Lasting::kSticky);
    const Status done = allocator->free(region);
    const bool fired = fake.fired();
    fake.heal();
    if (!fired) {
      EXPECT_SUCCEEDS(done);
      break;
    }
    if (done) continue;  // only a last call failed, that nothing hangs on
    if (done.error().state_changed && fake.failed_function() == "cuMemUnmap") {
      ++points;
      EXPECT_EQ(allocator->region_at(region)->state, RegionState::kBroken);
    }
    EXPECT_SUCCEEDS(allocator->free(region));
    EXPECT_EQ(device->info().mapped_bytes, 0u);
    EXPECT_EQ(device->info().physical_bytes, 0u);
    EXPECT_EQ(device->info().reserved_bytes, 0u);
  }
  EXPECT_GE(points, 2u);
}

}  // namespace
}  // namespace torpor
