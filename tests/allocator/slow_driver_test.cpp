// SPDX-License-Identifier: Apache-2.0
// A driver that takes its time holds up who asked it, and nobody else: while one call stands still inside the fake
// driver, calls about other memory come back.
#include <future>
#include <optional>
#include <thread>

#include "allocator/cuda/cuda_device.h"
#include "allocator/host_arena.h"
#include "allocator/sleep_allocator.h"
#include "base/units.h"
#include "tests/support/fake_cuda_driver.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::FakeCuda;
using test::value_of;
using namespace std::chrono_literals;

constexpr uint64_t kUnit = 2 * kMiB;

// Two ranges of memory, one mapped, one to be.
class SlowDriverTest : public ::testing::Test {
 protected:
  SlowDriverTest() : device_(value_of(make_cuda_device(fake_.driver(), {}))) {
    there_ = mapped();
    coming_ = value_of(device_->reserve(kUnit));
    fresh_ = value_of(device_->create(kUnit));
    EXPECT_SUCCEEDS(device_->map(coming_, fresh_));
    stream_ = value_of(device_->create_stream());
  }
  ~SlowDriverTest() override {
    EXPECT_SUCCEEDS(device_->destroy_stream(stream_));
    for (const DeviceAddress address : {there_, coming_}) {
      EXPECT_SUCCEEDS(device_->unmap(address, kUnit));
      EXPECT_SUCCEEDS(device_->free_reservation(address));
    }
    EXPECT_SUCCEEDS(device_->release(fresh_));
    device_.reset();
    EXPECT_EQ(fake_.left(), "");
  }
  DeviceAddress mapped() {
    const DeviceAddress address = value_of(device_->reserve(kUnit));
    const PhysicalId id = value_of(device_->create(kUnit));
    EXPECT_SUCCEEDS(device_->map(address, id));
    EXPECT_SUCCEEDS(device_->set_access(address, kUnit, Access::kReadWrite));
    EXPECT_SUCCEEDS(device_->release(id));
    return address;
  }
  void copy(Direction direction, std::byte* host, uint64_t bytes) {
    const Copy whole{.device = there_, .host = host, .bytes = bytes};
    EXPECT_SUCCEEDS(device_->copy_async(stream_, direction, {&whole, 1}));
    EXPECT_EQ(device_->wait(value_of(device_->record(stream_))).drain, Drain::kCompleted);
  }
  // Holds the next call of `function` that `slow` makes, and sees whether `other` ends meanwhile.
  void expect_meanwhile(const char* function, const std::function<void()>& slow, const std::function<void()>& other) {
    fake_.hold(function);
    std::thread first(slow);
    fake_.wait_until_held();
    std::future<void> second = std::async(std::launch::async, other);
    EXPECT_EQ(second.wait_for(20s), std::future_status::ready) << "it waited for " << function;
    fake_.resume();
    first.join();
    second.get();
  }
  FakeCuda fake_;
  std::unique_ptr<DeviceMemory> device_;
  DeviceAddress there_ = 0, coming_ = 0;
  PhysicalId fresh_{};
  StreamId stream_{};
};

TEST_F(SlowDriverTest, CopiesGoOnWhileOtherMemoryIsZeroed) {
  std::vector<std::byte> host(kUnit, std::byte{7});
  expect_meanwhile(
      "cuStreamSynchronize", [&] { EXPECT_SUCCEEDS(device_->set_access(coming_, kUnit, Access::kReadWrite)); },
      [&] { copy(Direction::kHostToDevice, host.data(), kUnit); });
}

TEST_F(SlowDriverTest, MemoryIsMappedAndZeroedWhileACopyBlocks) {
  std::vector<std::byte> host(kUnit);
  expect_meanwhile(
      "cuMemcpyDtoHAsync", [&] { copy(Direction::kDeviceToHost, host.data(), kUnit); },  // as of pageable memory
      [&] { EXPECT_SUCCEEDS(device_->set_access(coming_, kUnit, Access::kReadWrite)); });
}

TEST_F(SlowDriverTest, TheLedgerIsReadWhileMemoryIsCreated) {
  expect_meanwhile(
      "cuMemCreate",
      [&] {
        const PhysicalId id = value_of(device_->create(kUnit));
        EXPECT_SUCCEEDS(device_->release(id));
      },
      [&] { EXPECT_EQ(device_->info().mapped_bytes, 2 * kUnit); });
}

// What a slow call is at work on is not taken away under it.
TEST_F(SlowDriverTest, UnmappingWaitsForACopyThatIsBeingGiven) {
  const DeviceAddress short_lived = mapped();
  std::vector<std::byte> host(kUnit);
  fake_.hold("cuMemcpyDtoHAsync");
  std::thread copier([&] {
    const Copy whole{.device = short_lived, .host = host.data(), .bytes = kUnit};
    EXPECT_SUCCEEDS(device_->copy_async(stream_, Direction::kDeviceToHost, {&whole, 1}));
  });
  fake_.wait_until_held();
  const uint64_t before = fake_.counts()["cuMemUnmap"];
  std::promise<void> asked;
  std::thread unmapper([&] {
    asked.set_value();
    // Proven or not: here the copy is not even begun. The fake writes down what is unmapped under a copy.
    EXPECT_SUCCEEDS(device_->unmap(short_lived, kUnit));
  });
  asked.get_future().wait();
  EXPECT_EQ(fake_.counts()["cuMemUnmap"], before);
  fake_.resume();
  copier.join();
  unmapper.join();
  EXPECT_SUCCEEDS(device_->free_reservation(short_lived));
  EXPECT_EQ(device_->drain(stream_).drain, Drain::kCompleted);
  (void)fake_.take_misuses();  // the copy itself was never waited for
}

TEST_F(SlowDriverTest, RegionsAreSeenAndOthersUsedWhileOneIsAttached) {
  const auto allocator = value_of(SleepAllocator::create(*device_, {.handle_bytes = kUnit}));
  const std::vector<std::string> tags{"weights"};
  const DeviceAddress first = value_of(allocator->allocate("weights", "a", kUnit));
  const DeviceAddress second = value_of(allocator->allocate("weights", "b", kUnit));
  ASSERT_SUCCEEDS(allocator->detach(tags));
  ASSERT_SUCCEEDS(allocator->begin_attach(tags));
  ASSERT_SUCCEEDS(allocator->attach_region(first));
  std::vector<std::byte> host(kUnit, std::byte{7});
  expect_meanwhile(
      "cuStreamSynchronize", [&] { EXPECT_SUCCEEDS(allocator->attach_region(second)); },
      [&] {
        EXPECT_EQ(allocator->region_at(first)->state, RegionState::kRestoring);
        EXPECT_EQ(allocator->region_at(second)->state, RegionState::kAttaching);
        EXPECT_EQ(allocator->states().size(), 1u);
        const DeviceAddress other = value_of(allocator->allocate("kv_cache", "kv", kUnit));
        EXPECT_SUCCEEDS(allocator->free(other));
        const Copy whole{.device = first, .host = host.data(), .bytes = kUnit};
        EXPECT_SUCCEEDS(device_->copy_async(stream_, Direction::kHostToDevice, {&whole, 1}));
        EXPECT_EQ(device_->wait(value_of(device_->record(stream_))).drain, Drain::kCompleted);
      });
  EXPECT_SUCCEEDS(allocator->finish_restore(tags));
}

TEST_F(SlowDriverTest, HostMemoryThatIsThereIsGivenOutWhileMoreIsPinnedOrUnpinned) {
  const auto arena = value_of(HostArena::create({.slab_bytes = 2 * kMiB, .pin_for = device_.get()}));
  HostArena::Span kept = value_of(arena->allocate(4096));
  const auto use = [&] {
    HostArena::Span span = value_of(arena->allocate(4096));
    span = {};
    EXPECT_GE(arena->info().used_bytes, 4096u);
  };
  expect_meanwhile(
      "cuMemHostRegister", [&] { EXPECT_SUCCEEDS(arena->prefault(6 * kMiB)); }, use);
  expect_meanwhile(
      "cuMemHostUnregister", [&] { EXPECT_EQ(arena->trim(), 6 * kMiB); }, use);
}

}  // namespace
}  // namespace torpor
