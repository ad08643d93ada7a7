// SPDX-License-Identifier: Apache-2.0
#include "allocator/host_device.h"

#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "allocator/prefault.h"
#include "base/units.h"
#include "tests/contract/device_memory_contract.h"
#include "tests/support/mapping_flags.h"
#include "tests/support/sanitizers.h"

namespace torpor {
namespace {

using test::DeviceMemoryContract;
using test::value_of;

std::unique_ptr<DeviceMemory> at_once() { return value_of(make_host_device()); }
std::unique_ptr<DeviceMemory> deferred() { return value_of(make_host_device({.defer_copies = true})); }
std::unique_ptr<DeviceMemory> shuffled() {
  return value_of(make_host_device({.defer_copies = true, .shuffle_seed = 7}));
}
std::unique_ptr<DeviceMemory> like_a_gpu() {
  return value_of(make_host_device({.granularity_bytes = 2 * kMiB, .capacity_bytes = 64 * kMiB}));
}

INSTANTIATE_TEST_SUITE_P(HostDevice, DeviceMemoryContract, ::testing::Values(at_once, deferred, shuffled, like_a_gpu));

uint64_t resident_bytes() {
  std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen("/proc/self/status", "r"), std::fclose);
  char line[256];
  while (std::fgets(line, sizeof line, file.get()) != nullptr) {
    if (std::strncmp(line, "RssAnon:", 8) == 0) return std::strtoull(line + 8, nullptr, 10) * kKiB;
  }
  return 0;
}

TEST(HostDevice, UnmappedAndReleasedMemoryReallyGoesBackToTheSystem) {
  if (test::kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer keeps memory of its own for every byte";
  constexpr uint64_t kSize = 64 * kMiB;
  const auto device = at_once();
  const DeviceAddress address = value_of(device->reserve(kSize));
  const PhysicalId id = value_of(device->create(kSize));
  ASSERT_SUCCEEDS(device->map(address, id));
  ASSERT_SUCCEEDS(device->set_access(address, kSize, Access::kReadWrite));
  const uint64_t before = resident_bytes();
  std::memset(reinterpret_cast<void*>(address), 1, kSize);  // NOLINT(performance-no-int-to-ptr)
  EXPECT_GE(resident_bytes(), before + kSize);
  ASSERT_SUCCEEDS(device->unmap(address, kSize));
  ASSERT_SUCCEEDS(device->release(id));
  EXPECT_LT(resident_bytes(), before + kSize / 16);
  ASSERT_SUCCEEDS(device->free_reservation(address));
}

TEST(HostDevice, HasNewMemoryInSmallPagesAndLaterMemoryInHugeOnesWhileTheyAreWanted) {
  bool wanted = true;
  const auto device = value_of(make_host_device({.huge_pages = [&] { return wanted; }}));
  const auto flags_when_mapped = [&](DeviceAddress address) {
    const PhysicalId id = value_of(device->create(4 * kMiB));
    EXPECT_SUCCEEDS(device->map(address, id));
    std::string flags = test::flags_of_memory_at(reinterpret_cast<const void*>(address));  // NOLINT
    EXPECT_SUCCEEDS(device->unmap(address, 4 * kMiB));
    EXPECT_SUCCEEDS(device->release(id));
    return flags;
  };
  for (int round = 0; round < 2; ++round) {  // the second reservation may have the address of the first one
    const DeviceAddress address = value_of(device->reserve(4 * kMiB));
    wanted = true;
    EXPECT_THAT(flags_when_mapped(address), ::testing::HasSubstr(" nh"));
    EXPECT_THAT(flags_when_mapped(address), ::testing::HasSubstr(" hg"));
    wanted = false;
    EXPECT_THAT(flags_when_mapped(address), ::testing::HasSubstr(" nh"));
    ASSERT_SUCCEEDS(device->free_reservation(address));
  }
}

TEST(Prefault, TheAnswerWhetherHugePagesAreFastHoldsForAllOfAWake) {
  const HugePages fast = huge_pages_while_fast();
  const HugePages copy = fast;
  EXPECT_EQ(fast(), copy());
}

TEST(HostDevice, BeyondItsCapacityNothingIsCreatedAndTheErrorSaysHowMuchIsMissing) {
  const auto device = value_of(make_host_device({.capacity_bytes = 1 * kMiB}));
  const PhysicalId id = value_of(device->create(768 * kKiB));
  EXPECT_FAILS(device->create(512 * kKiB), Code::kResourceExhausted, std::to_string(512 * kKiB));
  ASSERT_SUCCEEDS(device->release(id));
  const PhysicalId again = value_of(device->create(1 * kMiB));
  ASSERT_SUCCEEDS(device->release(again));
}

TEST(HostDevice, ALinkSpeedIsTheMostThatCopiesGet) {
  constexpr uint64_t kSize = 1 * kMiB;
  const auto device = value_of(make_host_device({.link_bytes_per_second = 20 * kMiB}));
  const DeviceAddress address = value_of(device->reserve(kSize));
  const PhysicalId id = value_of(device->create(kSize));
  ASSERT_SUCCEEDS(device->map(address, id));
  ASSERT_SUCCEEDS(device->set_access(address, kSize, Access::kReadWrite));
  std::vector<std::byte> host(kSize);
  const StreamId stream = value_of(device->create_stream());
  const Copy copy{address, host.data(), kSize};
  const auto began = std::chrono::steady_clock::now();
  ASSERT_SUCCEEDS(device->copy_async(stream, Direction::kDeviceToHost, {&copy, 1}));
  EXPECT_EQ(device->wait(value_of(device->record(stream))).drain, Drain::kCompleted);
  EXPECT_GE(std::chrono::steady_clock::now() - began, std::chrono::milliseconds(50));
  ASSERT_SUCCEEDS(device->destroy_stream(stream));
  ASSERT_SUCCEEDS(device->unmap(address, kSize));
  ASSERT_SUCCEEDS(device->release(id));
  ASSERT_SUCCEEDS(device->free_reservation(address));
}

TEST(HostDevice, DeferredCopiesAreInvisibleUntilSomebodyWaits) {
  const auto device = deferred();
  const uint64_t unit = device->granularity();
  const DeviceAddress address = value_of(device->reserve(unit));
  const PhysicalId id = value_of(device->create(unit));
  ASSERT_SUCCEEDS(device->map(address, id));
  ASSERT_SUCCEEDS(device->set_access(address, unit, Access::kReadWrite));
  const StreamId stream = value_of(device->create_stream());
  std::byte value{7};
  const Copy copy{address, &value, 1};
  ASSERT_SUCCEEDS(device->copy_async(stream, Direction::kHostToDevice, {&copy, 1}));
  const EventId event = value_of(device->record(stream));
  const auto* seen = reinterpret_cast<const volatile std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
  const std::byte before = *seen;
  EXPECT_EQ(before, std::byte{0});
  EXPECT_EQ(device->wait(event).drain, Drain::kCompleted);
  const std::byte after = *seen;
  EXPECT_EQ(after, std::byte{7});
  ASSERT_SUCCEEDS(device->destroy_stream(stream));
  ASSERT_SUCCEEDS(device->unmap(address, unit));
  ASSERT_SUCCEEDS(device->release(id));
  ASSERT_SUCCEEDS(device->free_reservation(address));
}

TEST(HostDevice, AGranularityMustBeAPowerOfTwoOfAtLeastAPage) {
  for (const uint64_t bad : {uint64_t{0}, uint64_t{1}, uint64_t{2048}, uint64_t{65537}}) {
    EXPECT_FAILS(make_host_device({.granularity_bytes = bad}), Code::kInvalidArgument, "granularity") << bad;
  }
}

}  // namespace
}  // namespace torpor
