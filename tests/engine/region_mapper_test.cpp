// SPDX-License-Identifier: Apache-2.0
#include "engine/region_mapper.h"

#include "allocator/host_device.h"
#include "base/units.h"
#include "tests/support/faulty_device.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::value_of;

class RegionMapperTest : public ::testing::Test {
 protected:
  RegionMapperTest()
      : device_(value_of(make_host_device())),
        allocator_(value_of(SleepAllocator::create(device_, {.handle_bytes = 64 * kKiB}))) {
    for (int i = 0; i < 20; ++i)
      regions_.push_back(value_of(allocator_->allocate("weights", std::to_string(i), 64 * kKiB)));
    EXPECT_SUCCEEDS(allocator_->detach(tags_));
    EXPECT_SUCCEEDS(allocator_->begin_attach(tags_));
  }
  RegionState state(size_t i) { return allocator_->region_at(regions_[i])->state; }
  const std::vector<std::string> tags_{"weights"};
  test::FaultyDevice device_;
  std::unique_ptr<SleepAllocator> allocator_;
  std::vector<DeviceAddress> regions_;
};

TEST_F(RegionMapperTest, RegionsCanBeUsedAsSoonAsTheyAreThere) {
  RegionMapper mapper(*allocator_, regions_);
  for (size_t count = 1; count <= regions_.size(); ++count) {
    ASSERT_SUCCEEDS(mapper.wait(count));
    EXPECT_EQ(state(count - 1), RegionState::kRestoring);
    *reinterpret_cast<char*>(regions_[count - 1]) = 'x';  // NOLINT(performance-no-int-to-ptr)
  }
  EXPECT_TRUE(mapper.finished());
}

TEST_F(RegionMapperTest, AFailureEndsItAndIsToldToWhoeverWaits) {
  device_.fail_at(3 * 7 + 1);  // seven regions are created, mapped and get access
  {
    RegionMapper mapper(*allocator_, regions_);
    EXPECT_FAILS(mapper.wait(regions_.size()), Code::kDevice, "attaching weights/7");
    EXPECT_FALSE(mapper.finished());
  }
  EXPECT_EQ(state(6), RegionState::kRestoring);
  EXPECT_EQ(state(7), RegionState::kAttaching);
  device_.fail_at(0);
  RegionMapper again(*allocator_, regions_);
  EXPECT_SUCCEEDS(again.wait(regions_.size()));
}

TEST_F(RegionMapperTest, ItCanBeGivenUpAtAnyMoment) {
  for (int i = 0; i < 50; ++i) {
    {
      const RegionMapper mapper(*allocator_, regions_);
    }
    ASSERT_SUCCEEDS(allocator_->cancel_restore(tags_));
    ASSERT_SUCCEEDS(allocator_->begin_attach(tags_));
  }
}

}  // namespace
}  // namespace torpor
