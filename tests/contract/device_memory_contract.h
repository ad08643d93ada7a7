// SPDX-License-Identifier: Apache-2.0
// What every DeviceMemory must do. An implementation's test includes this and instantiates it with a factory:
//   INSTANTIATE_TEST_SUITE_P(Name, DeviceMemoryContract, ::testing::Values(factory));
// The suite needs a device whose granularity is at most 2 MiB and that can hold 64 MiB.
#pragma once

#include <functional>
#include <vector>

#include "allocator/device_memory.h"
#include "tests/support/results.h"

namespace torpor::test {

using DeviceFactory = std::function<std::unique_ptr<DeviceMemory>()>;

class DeviceMemoryContract : public ::testing::TestWithParam<DeviceFactory> {
 protected:
  void SetUp() override {
    device_ = GetParam()();
    unit_ = device_->granularity();
    stream_ = value_of(device_->create_stream());
  }
  void TearDown() override {
    ASSERT_SUCCEEDS(device_->destroy_stream(stream_));
    const DeviceMemoryInfo left = device_->info();
    EXPECT_EQ(left.mapped_bytes, 0u);
    EXPECT_EQ(left.physical_bytes, 0u);
    EXPECT_EQ(left.reserved_bytes, 0u);
  }
  std::vector<std::byte> read(DeviceAddress address, uint64_t bytes) {
    std::vector<std::byte> host(bytes);
    run(Direction::kDeviceToHost, {address, host.data(), bytes});
    return host;
  }
  void write(DeviceAddress address, std::vector<std::byte> host) {
    run(Direction::kHostToDevice, {address, host.data(), host.size()});
  }
  void run(Direction direction, Copy copy) {
    ASSERT_SUCCEEDS(device_->copy_async(stream_, direction, {&copy, 1}));
    EXPECT_EQ(device_->wait(value_of(device_->record(stream_))).drain, Drain::kCompleted);
  }
  void map_all(DeviceAddress address, PhysicalId id, uint64_t size) {
    ASSERT_SUCCEEDS(device_->map(address, id));
    ASSERT_SUCCEEDS(device_->set_access(address, size, Access::kReadWrite));
  }
  std::unique_ptr<DeviceMemory> device_;
  uint64_t unit_ = 0;
  StreamId stream_{};
};

TEST_P(DeviceMemoryContract, NewMemoryIsZero) {
  const DeviceAddress address = value_of(device_->reserve(unit_));
  const PhysicalId id = value_of(device_->create(unit_));
  map_all(address, id, unit_);
  EXPECT_EQ(read(address, unit_), std::vector<std::byte>(unit_));
  ASSERT_SUCCEEDS(device_->unmap(address, unit_));
  ASSERT_SUCCEEDS(device_->release(id));
  ASSERT_SUCCEEDS(device_->free_reservation(address));
}

TEST_P(DeviceMemoryContract, UnmappedMemoryKeepsItsContentAndMayAppearElsewhere) {
  const DeviceAddress address = value_of(device_->reserve(3 * unit_));
  const PhysicalId id = value_of(device_->create(unit_));
  map_all(address, id, unit_);
  const std::vector<std::byte> content(unit_, std::byte{0x5a});
  write(address, content);
  ASSERT_SUCCEEDS(device_->unmap(address, unit_));
  map_all(address + 2 * unit_, id, unit_);
  EXPECT_EQ(read(address + 2 * unit_, unit_), content);
  ASSERT_SUCCEEDS(device_->unmap(address + 2 * unit_, unit_));
  ASSERT_SUCCEEDS(device_->release(id));
  ASSERT_SUCCEEDS(device_->free_reservation(address));
}

TEST_P(DeviceMemoryContract, ReleasedMemoryGoesWithItsLastMapping) {
  const DeviceAddress address = value_of(device_->reserve(unit_));
  const PhysicalId id = value_of(device_->create(unit_));
  map_all(address, id, unit_);
  ASSERT_SUCCEEDS(device_->release(id));
  EXPECT_EQ(device_->info().physical_bytes, unit_);
  EXPECT_FAILS(device_->map(address, id), Code::kInvalidArgument);
  ASSERT_SUCCEEDS(device_->unmap(address, unit_));
  EXPECT_EQ(device_->info().physical_bytes, 0u);
  ASSERT_SUCCEEDS(device_->free_reservation(address));
}

TEST_P(DeviceMemoryContract, SizesAndAddressesMustBeAligned) {
  EXPECT_FAILS(device_->reserve(0), Code::kInvalidArgument);
  EXPECT_FAILS(device_->reserve(unit_ + 1), Code::kInvalidArgument);
  EXPECT_FAILS(device_->create(unit_ / 2), Code::kInvalidArgument);
  const DeviceAddress address = value_of(device_->reserve(2 * unit_));
  const PhysicalId id = value_of(device_->create(unit_));
  EXPECT_FAILS(device_->map(address + unit_ / 2, id), Code::kInvalidArgument);
  EXPECT_FAILS(device_->map(address + 2 * unit_, id), Code::kInvalidArgument);
  ASSERT_SUCCEEDS(device_->release(id));
  ASSERT_SUCCEEDS(device_->free_reservation(address));
}

TEST_P(DeviceMemoryContract, NothingIsMappedOverAnotherMapping) {
  const DeviceAddress address = value_of(device_->reserve(2 * unit_));
  const PhysicalId large = value_of(device_->create(2 * unit_));
  const PhysicalId small = value_of(device_->create(unit_));
  map_all(address + unit_, small, unit_);
  EXPECT_FAILS(device_->map(address, large), Code::kFailedPrecondition);
  EXPECT_FAILS(device_->map(address + unit_, small), Code::kFailedPrecondition);
  ASSERT_SUCCEEDS(device_->unmap(address + unit_, unit_));
  ASSERT_SUCCEEDS(device_->map(address, large));
  EXPECT_FAILS(device_->unmap(address, unit_), Code::kInvalidArgument);  // half a mapping
  EXPECT_FAILS(device_->free_reservation(address), Code::kFailedPrecondition);
  ASSERT_SUCCEEDS(device_->unmap(address, 2 * unit_));
  ASSERT_SUCCEEDS(device_->release(large));
  ASSERT_SUCCEEDS(device_->release(small));
  ASSERT_SUCCEEDS(device_->free_reservation(address));
}

TEST_P(DeviceMemoryContract, CopiesNeedAccess) {
  const DeviceAddress address = value_of(device_->reserve(2 * unit_));
  const PhysicalId id = value_of(device_->create(unit_));
  ASSERT_SUCCEEDS(device_->map(address, id));
  std::vector<std::byte> host(2 * unit_);
  const Copy copy{address, host.data(), unit_};
  const Copy beyond{address, host.data(), 2 * unit_};
  EXPECT_FAILS(device_->copy_async(stream_, Direction::kDeviceToHost, {&copy, 1}), Code::kInvalidArgument);
  EXPECT_FAILS(device_->copy_async(stream_, Direction::kHostToDevice, {&copy, 1}), Code::kInvalidArgument);
  ASSERT_SUCCEEDS(device_->set_access(address, unit_, Access::kReadWrite));
  EXPECT_SUCCEEDS(device_->copy_async(stream_, Direction::kDeviceToHost, {&copy, 1}));
  EXPECT_FAILS(device_->copy_async(stream_, Direction::kDeviceToHost, {&beyond, 1}), Code::kInvalidArgument);
  EXPECT_EQ(device_->wait(value_of(device_->record(stream_))).drain, Drain::kCompleted);
  EXPECT_FAILS(device_->set_access(address, 2 * unit_, Access::kReadWrite), Code::kInvalidArgument);
  ASSERT_SUCCEEDS(device_->set_access(address, unit_, Access::kNone));
  EXPECT_FAILS(device_->copy_async(stream_, Direction::kDeviceToHost, {&copy, 1}), Code::kInvalidArgument);
  ASSERT_SUCCEEDS(device_->unmap(address, unit_));
  ASSERT_SUCCEEDS(device_->release(id));
  ASSERT_SUCCEEDS(device_->free_reservation(address));
}

TEST_P(DeviceMemoryContract, UnknownIdsAreRefused) {
  EXPECT_FALSE(device_->release(PhysicalId{987654}).has_value());
  EXPECT_FALSE(device_->map(unit_, PhysicalId{987654}).has_value());
  EXPECT_FALSE(device_->free_reservation(unit_).has_value());
  EXPECT_FALSE(device_->unmap(unit_, unit_).has_value());
  EXPECT_FALSE(device_->destroy_stream(StreamId{987654}).has_value());
  EXPECT_FALSE(device_->record(StreamId{987654}).has_value());
  EXPECT_NE(device_->wait(EventId{987654}).drain, Drain::kCompleted);
}

TEST_P(DeviceMemoryContract, CopiesOnOneStreamHappenInOrder) {
  const DeviceAddress address = value_of(device_->reserve(unit_));
  const PhysicalId id = value_of(device_->create(unit_));
  map_all(address, id, unit_);
  std::vector<std::vector<std::byte>> written;
  for (int i = 0; i < 50; ++i) {
    written.emplace_back(64, static_cast<std::byte>(i));
    const Copy copy{address, written.back().data(), 64};
    ASSERT_SUCCEEDS(device_->copy_async(stream_, Direction::kHostToDevice, {&copy, 1}));
  }
  EXPECT_EQ(device_->wait(value_of(device_->record(stream_))).drain, Drain::kCompleted);
  EXPECT_EQ(read(address, 64), written.back());
  ASSERT_SUCCEEDS(device_->unmap(address, unit_));
  ASSERT_SUCCEEDS(device_->release(id));
  ASSERT_SUCCEEDS(device_->free_reservation(address));
}

TEST_P(DeviceMemoryContract, CopiesWithinTheDeviceAreOverWhenTheCallReturns) {
  const DeviceAddress address = value_of(device_->reserve(4 * unit_));
  const PhysicalId first = value_of(device_->create(unit_));
  const PhysicalId second = value_of(device_->create(2 * unit_));
  map_all(address, first, unit_);
  map_all(address + unit_, second, 2 * unit_);
  std::vector<std::byte> content(unit_);
  for (size_t i = 0; i < content.size(); ++i) content[i] = static_cast<std::byte>(i * 7);
  write(address + unit_ / 2, content);  // in both memories
  const std::vector<InnerCopy> copies{{address + 2 * unit_, address + unit_ / 2, unit_ - 64},
                                      {address, address + unit_ + 8, 16}};
  ASSERT_SUCCEEDS(device_->copy_within(copies));
  std::vector<std::byte> expected(content.begin(), content.end() - 64);
  EXPECT_EQ(read(address + 2 * unit_, unit_ - 64), expected);
  EXPECT_EQ(read(address + 3 * unit_ - 64, 64), std::vector<std::byte>(64));
  const auto from = content.begin() + static_cast<std::ptrdiff_t>(unit_ / 2 + 8);
  EXPECT_EQ(read(address, 16), std::vector<std::byte>(from, from + 16));
  EXPECT_EQ(read(address + unit_ / 2, unit_), content);
  ASSERT_SUCCEEDS(device_->copy_within({}));
  const auto refused = [&](std::vector<InnerCopy> wrong) {
    EXPECT_FAILS(device_->copy_within(wrong), Code::kInvalidArgument);
  };
  refused({{address, address + unit_, 0}});
  refused({{address + 3 * unit_, address, 8}});       // not mapped
  refused({{address, address + 3 * unit_ - 8, 16}});  // in part
  refused({{address, address + 4, 8}});               // itself
  refused({{address + 4, address, 8}});
  refused({{address, address + unit_, 8}, {address + 4, address + 2 * unit_, 8}});  // two targets
  refused({{address, address + unit_, 8}, {address + 2 * unit_, address, 8}});      // a target is a source, too
  EXPECT_EQ(read(address, 16), std::vector<std::byte>(from, from + 16));
  ASSERT_SUCCEEDS(device_->unmap(address, 3 * unit_));
  ASSERT_SUCCEEDS(device_->release(first));
  ASSERT_SUCCEEDS(device_->release(second));
  ASSERT_SUCCEEDS(device_->free_reservation(address));
}

}  // namespace torpor::test
