// SPDX-License-Identifier: Apache-2.0
// The device of the paced benches charges what its table says. Nothing is timed: it only counts.
#include "tools/bench/paced_device.h"

#include "base/units.h"
#include "tests/contract/device_memory_contract.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using bench::Charges;
using bench::PacedDevice;
using bench::Prices;
using test::value_of;

constexpr uint64_t kSize = 4 * kMiB;

class PacedDeviceTest : public ::testing::Test {
 protected:
  void make(uint64_t gather_below_bytes = 0, uint64_t pin_step_bytes = kGiB) {
    device_ = std::make_unique<PacedDevice>(bench::PacedOptions{
        .prices = prices_, .gather_below_bytes = gather_below_bytes, .pin_step_bytes = pin_step_bytes, .waits = false});
  }
  void map() {
    address_ = value_of(device_->reserve(kSize));
    id_ = value_of(device_->create(kSize));
    EXPECT_SUCCEEDS(device_->map(address_, id_));
    EXPECT_SUCCEEDS(device_->set_access(address_, kSize, Access::kReadWrite));
    stream_ = value_of(device_->create_stream());
  }
  void unmap() {
    EXPECT_SUCCEEDS(device_->destroy_stream(stream_));
    EXPECT_SUCCEEDS(device_->unmap(address_, kSize));
    EXPECT_SUCCEEDS(device_->release(id_));
    EXPECT_SUCCEEDS(device_->free_reservation(address_));
  }
  // Copy in so many pieces in one call, wait, and return what was charged for it.
  Charges copied(Direction direction, uint64_t pieces) {
    const Charges before = device_->charges();
    std::vector<Copy> copies;
    for (uint64_t i = 0; i < pieces; ++i)
      copies.push_back({address_ + i * kSize / pieces, host_.data() + i * kSize / pieces, kSize / pieces});
    EXPECT_SUCCEEDS(device_->copy_async(stream_, direction, copies));
    EXPECT_EQ(device_->wait(value_of(device_->record(stream_))).drain, Drain::kCompleted);
    return device_->charges() - before;
  }
  static int64_t nanoseconds(uint64_t bytes, double rate) {
    return static_cast<int64_t>(static_cast<double>(bytes) / rate * 1e9);
  }

  const Prices prices_;
  std::unique_ptr<PacedDevice> device_;
  std::vector<std::byte> host_ = std::vector<std::byte>(kSize);
  DeviceAddress address_ = 0;
  PhysicalId id_{};
  StreamId stream_{};
};

TEST_F(PacedDeviceTest, EachCallOfTheDriverHasItsPrice) {
  make();
  map();
  const int64_t mapped = prices_.reserve_ns + prices_.create_ns + prices_.map_ns + prices_.set_access_ns;
  EXPECT_EQ(device_->charges().maps, mapped);
  EXPECT_EQ(device_->charges().zeroing, nanoseconds(kSize, prices_.zero_rate));
  unmap();
  EXPECT_EQ(device_->charges().maps, mapped + prices_.unmap_ns);
}

TEST_F(PacedDeviceTest, ACopyPaysForItsCallItsPiecesAndItsBytes) {
  make();
  map();
  for (const Direction direction : {Direction::kDeviceToHost, Direction::kHostToDevice}) {
    for (const uint64_t pieces : {1, 64}) {
      const Charges charged = copied(direction, pieces);
      EXPECT_EQ(charged.copy_calls, prices_.copy_call_ns);
      EXPECT_EQ(charged.pieces, static_cast<int64_t>(pieces) * prices_.piece_ns);
      EXPECT_EQ(charged.link, nanoseconds(kSize, prices_.link_rate));
      EXPECT_EQ(charged.digests, nanoseconds(kSize, prices_.digest_rate));
      EXPECT_EQ(charged.maps + charged.pins, 0);
    }
  }
  unmap();
}

TEST_F(PacedDeviceTest, TheKernelPaysNoPiecesAndHasItsOwnRates) {
  make(128 * kKiB);
  map();
  const Charges down = copied(Direction::kDeviceToHost, 2048);  // two launches
  EXPECT_EQ(down.copy_calls, 2 * prices_.copy_call_ns);
  EXPECT_EQ(down.pieces, 0);
  EXPECT_EQ(down.link, nanoseconds(kSize, prices_.kernel_down_rate));
  EXPECT_EQ(copied(Direction::kHostToDevice, 64).link, nanoseconds(kSize, prices_.kernel_up_rate));
  // Pieces as large as the threshold, and one alone, go by the copy engines.
  EXPECT_EQ(copied(Direction::kHostToDevice, 32).link, nanoseconds(kSize, prices_.link_rate));
  EXPECT_EQ(copied(Direction::kHostToDevice, 1).pieces, prices_.piece_ns);
  unmap();
}

TEST_F(PacedDeviceTest, PinsPayByByteAndStepByStep) {
  make(0, kMiB);
  EXPECT_SUCCEEDS(device_->pin_host(host_));
  EXPECT_EQ(device_->charges().pins, 4 * nanoseconds(kMiB, prices_.pin_rate));
  EXPECT_EQ(device_->charges().maps, 0);
}

TEST_F(PacedDeviceTest, APinHoldsUpEveryOtherCallOfTheDriver) {
  make();
  EXPECT_SUCCEEDS(device_->pin_host(host_));
  EXPECT_EQ(device_->charges().waited_for_driver, 0);
  const int64_t pin = nanoseconds(kSize, prices_.pin_rate);
  const PhysicalId id = value_of(device_->create(kSize));
  EXPECT_EQ(device_->charges().waited_for_driver, pin);
  EXPECT_SUCCEEDS(device_->release(id));
  map();
  const int64_t mapped = device_->charges().maps;
  const Charges copy = copied(Direction::kDeviceToHost, 1);
  EXPECT_EQ(copy.waited_for_driver, pin + mapped);
  EXPECT_EQ(copy.waited_for_link, copy.link + copy.pieces);  // nothing else is on the link
  unmap();
}

TEST_F(PacedDeviceTest, StreamsShareTheLinkInOneDirectionAndDirectionsDoNot) {
  make();
  map();
  const Charges down = copied(Direction::kDeviceToHost, 1);
  const int64_t one = down.link + down.pieces;
  EXPECT_EQ(down.waited_for_link, one);
  const StreamId first = stream_;
  stream_ = value_of(device_->create_stream());
  EXPECT_EQ(copied(Direction::kDeviceToHost, 1).waited_for_link, 2 * one);  // behind the other stream's
  EXPECT_SUCCEEDS(device_->destroy_stream(stream_));
  stream_ = value_of(device_->create_stream());
  EXPECT_EQ(copied(Direction::kHostToDevice, 1).waited_for_link, one);
  EXPECT_SUCCEEDS(device_->destroy_stream(stream_));
  stream_ = first;
  unmap();
}

TEST_F(PacedDeviceTest, OneFactorSlowsEveryPrice) {
  const Prices slow = prices_.slowed(110);
  EXPECT_NEAR(slow.link_rate, 0.5e9, 1);
  EXPECT_EQ(slow.copy_call_ns, 220'000);
  EXPECT_EQ(slow.piece_ns, 77'000);
  EXPECT_NEAR(slow.pin_rate, 154.5e6, 0.1e6);
  EXPECT_EQ(slow.create_ns, 110 * prices_.create_ns);
  EXPECT_EQ(slow.unmap_ns, 110 * prices_.unmap_ns);
  for (const auto rate : {&Prices::kernel_down_rate, &Prices::kernel_up_rate, &Prices::zero_rate, &Prices::digest_rate})
    EXPECT_NEAR(slow.*rate, prices_.*rate / 110, 1);
  for (const auto price : {&Prices::reserve_ns, &Prices::map_ns, &Prices::set_access_ns})
    EXPECT_EQ(slow.*price, 110 * prices_.*price);
}

TEST_F(PacedDeviceTest, BytesReallyMove) {
  make();
  map();
  std::fill(host_.begin(), host_.end(), std::byte{7});
  copied(Direction::kHostToDevice, 8);
  std::fill(host_.begin(), host_.end(), std::byte{0});
  copied(Direction::kDeviceToHost, 3);
  EXPECT_EQ(std::count(host_.begin(), host_.end() - 2, std::byte{7}), static_cast<int64_t>(kSize) - 2);
  unmap();
}

}  // namespace

namespace test {
namespace {

// It is a device like others, whether it waits or only counts.
std::unique_ptr<DeviceMemory> waiting() { return std::make_unique<PacedDevice>(bench::PacedOptions{}); }
std::unique_ptr<DeviceMemory> counting() { return std::make_unique<PacedDevice>(bench::PacedOptions{.waits = false}); }
INSTANTIATE_TEST_SUITE_P(PacedDevice, DeviceMemoryContract, ::testing::Values(waiting, counting));

}  // namespace
}  // namespace test
}  // namespace torpor
