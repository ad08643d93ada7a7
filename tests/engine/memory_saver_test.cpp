#include "engine/memory_saver.h"

#include <cstring>

#include "allocator/host_device.h"
#include "base/units.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::value_of;

class MemorySaverTest : public ::testing::Test {
 protected:
  static std::byte* at(DeviceAddress address) {
    return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
  }
  MemorySaver memory_{[](int ordinal) -> Result<std::unique_ptr<RankMemory>> {
    TORPOR_ASSIGN(std::unique_ptr<DeviceMemory> device, make_host_device({.capacity_bytes = 64 * kMiB}));
    return RankMemory::create(std::move(device), linux_file_system(), {.rank = ordinal, .handle_bytes = 2 * kMiB});
  }};
};

TEST_F(MemorySaverTest, AnAllocationThatWouldLeaveLessThanTheMarginFails) {
  memory_.set_margin(32 * kMiB);
  EXPECT_TRUE(memory_.allocate(0, 32 * kMiB));
  const auto refused = memory_.allocate(0, 1 * kMiB);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kResourceExhausted);
  memory_.set_margin(31 * kMiB);
  EXPECT_FALSE(memory_.allocate(0, 2 * kMiB));
  memory_.set_margin(0);
  EXPECT_TRUE(memory_.allocate(0, 2 * kMiB));
}

TEST_F(MemorySaverTest, WhatIsSavedCanBeReadFromAnyPlaceOfItsRegionWhileItSleeps) {
  constexpr uint64_t kSize = 9 * kMiB;  // three pieces
  const DeviceAddress other = value_of(memory_.allocate(0, 5000));
  const DeviceAddress address = value_of(memory_.allocate(0, kSize));
  for (uint64_t i = 0; i < kSize; ++i) at(address)[i] = static_cast<std::byte>(i / 4096 + i % 251);
  std::memset(at(other), 9, 5000);
  const std::vector<std::byte> expected(at(address), at(address) + kSize);
  std::vector<std::byte> read(kSize);
  EXPECT_EQ(memory_.read_saved(address, read).error().code, Code::kNotFound);  // it is awake
  ASSERT_TRUE(memory_.sleep({}));
  ASSERT_TRUE(memory_.read_saved(address, read));
  EXPECT_EQ(read, expected);
  std::vector<std::byte> part(5 * kMiB);
  ASSERT_TRUE(memory_.read_saved(address + 4 * kMiB - 1, part));
  EXPECT_TRUE(std::equal(part.begin(), part.end(), expected.begin() + 4 * kMiB - 1));
  EXPECT_FALSE(memory_.read_saved(address + 4 * kMiB + 1, part));  // beyond its end
  EXPECT_FALSE(memory_.read_saved(UINT64_MAX - 4, part));
  ASSERT_TRUE(memory_.wake({}));
  EXPECT_FALSE(memory_.read_saved(address, read));
}

TEST_F(MemorySaverTest, ABackupOnDiskIsRefusedByName) {
  MemorySaver::scopes().push_back({.tag = "t", .on_disk = true});
  const auto refused = memory_.allocate(0, 5000);
  MemorySaver::scopes().pop_back();
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kUnsupported);
}

}  // namespace
}  // namespace torpor
