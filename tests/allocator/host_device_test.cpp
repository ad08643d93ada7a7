// SPDX-License-Identifier: Apache-2.0
#include "allocator/host_device.h"

#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include <gmock/gmock.h>

#include "allocator/prefault.h"
#include "base/units.h"
#include "tests/contract/device_memory_contract.h"
#include "tests/support/mapping_flags.h"
#include "tests/support/sanitizers.h"
#include "tests/support/temporary_directory.h"

namespace torpor {
namespace {

using test::DeviceMemoryContract;
using test::value_of;

std::unique_ptr<DeviceMemory> at_once() { return value_of(make_host_device()); }
std::unique_ptr<DeviceMemory> deferred() { return value_of(make_host_device({.defer_copies = true})); }
std::unique_ptr<DeviceMemory> shuffled() {
  return value_of(make_host_device({.defer_copies = true, .shuffle_seed = 7}));
}
std::unique_ptr<DeviceMemory> shared() {
  static const test::TemporaryDirectory folder;
  return value_of(make_host_device({.capacity_bytes = 64 * kMiB, .shared_file = folder.path() + "/device"}));
}
std::unique_ptr<DeviceMemory> like_a_gpu() {
  return value_of(make_host_device({.granularity_bytes = 2 * kMiB, .capacity_bytes = 64 * kMiB}));
}

INSTANTIATE_TEST_SUITE_P(HostDevice, DeviceMemoryContract,
                         ::testing::Values(at_once, deferred, shuffled, like_a_gpu, shared));

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

TEST(HostDevice, IsInSmallPagesUntilCopiesFillHugeOnesWhileTheyAreWantedAndFast) {
  constexpr uint64_t kSize = 4 * kMiB;
  bool wanted = true;
  const auto device = value_of(make_host_device({.huge_pages = [&] { return wanted; }, .slow_bytes_per_second = 0}));
  const auto slow =
      value_of(make_host_device({.huge_pages = [] { return true; }, .slow_bytes_per_second = uint64_t{1} << 60}));
  std::vector<std::byte> host(kSize);
  // The flags of new memory before and after copies of these bytes to it.
  const auto flags = [&](DeviceMemory& of, std::initializer_list<uint64_t> copied) {
    const DeviceAddress address = value_of(of.reserve(kSize));
    const PhysicalId id = value_of(of.create(kSize));
    EXPECT_SUCCEEDS(of.map(address, id));
    EXPECT_SUCCEEDS(of.set_access(address, kSize, Access::kReadWrite));
    const auto now = [&] { return test::flags_of_memory_at(reinterpret_cast<const void*>(address)); };  // NOLINT
    EXPECT_THAT(now(), ::testing::HasSubstr(" nh"));
    const StreamId stream = value_of(of.create_stream());
    std::vector<Copy> copies;
    uint64_t at = 0;
    for (const uint64_t bytes : copied) {
      copies.push_back({address + at, host.data() + at, bytes});
      at += bytes + (copied.size() > 2 ? 64 : 0);
    }
    EXPECT_SUCCEEDS(of.copy_async(stream, Direction::kHostToDevice, copies));
    EXPECT_EQ(of.drain(stream).drain, Drain::kCompleted);
    std::string found = now();
    EXPECT_SUCCEEDS(of.destroy_stream(stream));
    EXPECT_SUCCEEDS(of.unmap(address, kSize));
    EXPECT_SUCCEEDS(of.release(id));
    EXPECT_SUCCEEDS(of.free_reservation(address));
    return found;
  };
  EXPECT_THAT(flags(*device, {2 * kMiB}), ::testing::HasSubstr(" hg"));
  EXPECT_THAT(flags(*device, {kMiB, kMiB}), ::testing::HasSubstr(" hg"));        // one after the other
  EXPECT_THAT(flags(*device, {kMiB, kMiB, kMiB}), ::testing::HasSubstr(" nh"));  // with gaps
  EXPECT_THAT(flags(*device, {2 * kMiB - 64}), ::testing::HasSubstr(" nh"));
  wanted = false;
  EXPECT_THAT(flags(*device, {2 * kMiB}), ::testing::HasSubstr(" nh"));
  for (int round = 0; round < 2; ++round) EXPECT_THAT(flags(*slow, {2 * kMiB}), ::testing::HasSubstr(" nh"));
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

TEST(HostDevice, DevicesOfOneFileShareTheirCapacityAndWhatAProcessHadIsFreeWhenItWasKilled) {
  const test::TemporaryDirectory folder;
  const HostDeviceOptions options{.capacity_bytes = 1 * kMiB, .shared_file = folder.path() + "/device"};
  const auto device = value_of(make_host_device(options));
  const auto other = value_of(make_host_device(options));
  const auto used = [&] { return device->info().used_bytes; };
  const PhysicalId first = value_of(device->create(256 * kKiB));
  const PhysicalId second = value_of(other->create(256 * kKiB));
  ASSERT_SUCCEEDS(device->release(first));  // leaves a gap below the other's
  const PhysicalId both_sides_of_it = value_of(device->create(768 * kKiB));
  EXPECT_EQ(used(), 1 * kMiB);
  EXPECT_EQ(other->info().free_bytes(), 0);
  EXPECT_FAILS(other->create(64 * kKiB), Code::kResourceExhausted, "0 of 1048576 are free");
  ASSERT_SUCCEEDS(device->release(both_sides_of_it));
  EXPECT_EQ(used(), 256 * kKiB);

  std::array<int, 2> ready{};
  ASSERT_EQ(::pipe(ready.data()), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto its_own = make_host_device(options);
    const bool done = its_own && (*its_own)->create(512 * kKiB) && !(*its_own)->create(512 * kKiB);
    if (::write(ready[1], done ? "y" : "n", 1) == 1) ::pause();
    ::_exit(1);
  }
  char answer = 0;
  ASSERT_EQ(::read(ready[0], &answer, 1), 1);
  EXPECT_EQ(answer, 'y');
  EXPECT_EQ(used(), 768 * kKiB);
  EXPECT_FAILS(device->create(512 * kKiB), Code::kResourceExhausted, "262144 of 1048576 are free");
  EXPECT_EQ(used(), 768 * kKiB);  // what was refused took nothing
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  const PhysicalId again = value_of(device->create(768 * kKiB));
  ASSERT_SUCCEEDS(device->release(again));
  ASSERT_SUCCEEDS(other->release(second));
  EXPECT_EQ(used(), 0);
  for (const int end : ready) ::close(end);
}

TEST(HostDevice, SharedMemoryOfADeviceIsFreeWhenItsLastMappingGoes) {
  const test::TemporaryDirectory folder;
  const auto device =
      value_of(make_host_device({.capacity_bytes = 1 * kMiB, .shared_file = folder.path() + "/device"}));
  const DeviceAddress address = value_of(device->reserve(64 * kKiB));
  const PhysicalId id = value_of(device->create(64 * kKiB));
  ASSERT_SUCCEEDS(device->map(address, id));
  ASSERT_SUCCEEDS(device->release(id));
  EXPECT_EQ(device->info().used_bytes, 64 * kKiB);
  ASSERT_SUCCEEDS(device->unmap(address, 64 * kKiB));
  EXPECT_EQ(device->info().used_bytes, 0);
  ASSERT_SUCCEEDS(device->free_reservation(address));
  EXPECT_FAILS(make_host_device({.shared_file = folder.path() + "/device"}), Code::kInvalidArgument,
               "without a capacity");
  EXPECT_FAILS(make_host_device({.capacity_bytes = 1 * kMiB, .shared_file = folder.path()}), Code::kIo, "cannot open");
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
