// SPDX-License-Identifier: Apache-2.0
#include "allocator/sleep_allocator.h"

#include <cstring>

#include <fmt/core.h>

#include "allocator/host_device.h"
#include "base/units.h"
#include "tests/support/faulty_device.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::FaultyDevice;
using test::value_of;
using Tags = std::vector<std::string>;

constexpr uint64_t kUnit = 64 * kKiB;

std::byte* at(DeviceAddress address) {
  return reinterpret_cast<std::byte*>(address);
}  // NOLINT(performance-no-int-to-ptr)

// All regions of the tags, as a wake does it.
Status attach(SleepAllocator& allocator, const Tags& tags) {
  TORPOR_RETURN_IF_ERROR(allocator.begin_attach(tags));
  for (const std::string& tag : tags) {
    for (const RegionInfo& region : allocator.regions_of(tag)) {
      const Status done = allocator.attach_region(region.address);
      if (done) continue;
      (void)allocator.cancel_restore(tags);
      return done;
    }
  }
  return ok();
}

class SleepAllocatorTest : public ::testing::Test {
 protected:
  SleepAllocatorTest()
      : device_(value_of(make_host_device())),
        allocator_(value_of(SleepAllocator::create(device_, {.handle_bytes = kUnit}))) {
    weights_ = value_of(allocator_->allocate("weights", "a", 3 * kUnit));
    more_weights_ = value_of(allocator_->allocate("weights", "b", 100));
    kv_ = value_of(allocator_->allocate("kv_cache", "kv", 2 * kUnit));
    std::memset(at(weights_), 1, 3 * kUnit);
    std::memset(at(more_weights_), 2, 100);
    std::memset(at(kv_), 3, 2 * kUnit);
  }
  void expect_content() {
    EXPECT_EQ(at(weights_)[3 * kUnit - 1], std::byte{1});
    EXPECT_EQ(at(more_weights_)[99], std::byte{2});
    EXPECT_EQ(at(kv_)[0], std::byte{3});
  }
  RegionState state(const std::string& tag) { return allocator_->states().at(tag); }
  const Tags both_{"weights", "kv_cache"};
  FaultyDevice device_;
  std::unique_ptr<SleepAllocator> allocator_;
  DeviceAddress weights_ = 0, more_weights_ = 0, kv_ = 0;
};

TEST_F(SleepAllocatorTest, MemoryGoesAndComesBackUnderTheSameAddresses) {
  EXPECT_EQ(device_.info().physical_bytes, 6 * kUnit);
  ASSERT_SUCCEEDS(allocator_->detach(both_));
  EXPECT_EQ(device_.info().physical_bytes, 0u);
  EXPECT_EQ(device_.info().reserved_bytes, 6 * kUnit);
  EXPECT_EQ(state("weights"), RegionState::kDetached);
  ASSERT_SUCCEEDS(attach(*allocator_, both_));
  EXPECT_EQ(state("kv_cache"), RegionState::kRestoring);
  EXPECT_EQ(at(weights_)[0], std::byte{0});  // fresh
  at(kv_)[2 * kUnit - 1] = std::byte{9};     // writable
  ASSERT_SUCCEEDS(allocator_->finish_restore(both_));
  EXPECT_EQ(state("weights"), RegionState::kAttached);
}

TEST_F(SleepAllocatorTest, RegionsComeOneAfterTheOther) {
  ASSERT_SUCCEEDS(allocator_->detach(both_));
  EXPECT_FAILS(allocator_->attach_region(weights_), Code::kFailedPrecondition, "detached");
  ASSERT_SUCCEEDS(allocator_->begin_attach(both_));
  EXPECT_EQ(device_.info().physical_bytes, 0u);
  EXPECT_EQ(state("weights"), RegionState::kAttaching);
  ASSERT_SUCCEEDS(allocator_->attach_region(weights_));
  ASSERT_SUCCEEDS(allocator_->attach_region(weights_));
  at(weights_)[0] = std::byte{5};
  EXPECT_EQ(device_.info().physical_bytes, 3 * kUnit);
  EXPECT_EQ(device_.info().mapped_bytes, 3 * kUnit);
  EXPECT_FAILS(allocator_->finish_restore(both_), Code::kFailedPrecondition, "attaching");
  EXPECT_FAILS(allocator_->free(kv_), Code::kFailedPrecondition);
  EXPECT_FAILS(allocator_->attach_region(12345), Code::kNotFound);
  ASSERT_SUCCEEDS(allocator_->cancel_restore(both_));  // of a region that is there and two that are not
  EXPECT_EQ(device_.info().physical_bytes, 0u);
  ASSERT_SUCCEEDS(allocator_->begin_attach(both_));
  allocator_.reset();  // in the middle
  EXPECT_EQ(device_.info().physical_bytes, 0u);
  EXPECT_EQ(device_.info().reserved_bytes, 0u);
}

TEST_F(SleepAllocatorTest, TagsSleepAlone) {
  ASSERT_SUCCEEDS(allocator_->detach(Tags{"kv_cache"}));
  EXPECT_EQ(device_.info().physical_bytes, 4 * kUnit);
  EXPECT_EQ(at(weights_)[0], std::byte{1});
  EXPECT_SUCCEEDS(allocator_->allocate("weights", "more", 1));
}

// It is there at once, and neither a wake nor its undoing touches it.
TEST_F(SleepAllocatorTest, ARegionComesWhileItsTagSleeps) {
  const Tags tags{"weights"};
  ASSERT_SUCCEEDS(allocator_->detach(tags));
  const DeviceAddress fresh = value_of(allocator_->allocate("weights", "fresh", kUnit));
  std::memset(at(fresh), 7, kUnit);
  EXPECT_EQ(state("weights"), RegionState::kDetached);
  EXPECT_FAILS(allocator_->begin_save(tags), Code::kFailedPrecondition);
  EXPECT_FAILS(allocator_->detach(tags), Code::kFailedPrecondition);
  for (const bool undone : {true, false}) {
    ASSERT_SUCCEEDS(attach(*allocator_, tags));
    EXPECT_EQ(state("weights"), RegionState::kRestoring);
    EXPECT_FAILS(allocator_->allocate("weights", "later", 1), Code::kFailedPrecondition, "restoring");
    EXPECT_EQ(allocator_->pages_of(tags).size(), 4u);  // of the two that come
    ASSERT_SUCCEEDS(undone ? allocator_->cancel_restore(tags) : allocator_->finish_restore(tags));
    EXPECT_EQ(state("weights"), undone ? RegionState::kDetached : RegionState::kAttached);
    EXPECT_EQ(at(fresh)[kUnit - 1], std::byte{7});
  }
  EXPECT_FAILS(allocator_->cancel_restore(tags), Code::kFailedPrecondition);  // all are awake
  ASSERT_SUCCEEDS(allocator_->detach(tags));
  EXPECT_EQ(state("weights"), RegionState::kDetached);
}

TEST_F(SleepAllocatorTest, EveryTransitionThatIsNotAllowedIsRefusedAndChangesNothing) {
  const Tags tags{"weights"};
  EXPECT_FAILS(attach(*allocator_, tags), Code::kFailedPrecondition, "attached");
  EXPECT_FAILS(allocator_->finish_restore(tags), Code::kFailedPrecondition);
  EXPECT_FAILS(allocator_->cancel_restore(tags), Code::kFailedPrecondition);
  EXPECT_FAILS(allocator_->cancel_save(tags), Code::kFailedPrecondition);
  ASSERT_SUCCEEDS(allocator_->begin_save(tags));
  EXPECT_FAILS(allocator_->begin_save(tags), Code::kFailedPrecondition, "saving");
  EXPECT_FAILS(attach(*allocator_, tags), Code::kFailedPrecondition);
  EXPECT_FAILS(allocator_->free(weights_), Code::kFailedPrecondition);
  EXPECT_FAILS(allocator_->allocate("weights", "c", 1), Code::kFailedPrecondition);
  ASSERT_SUCCEEDS(allocator_->cancel_save(tags));
  expect_content();
  ASSERT_SUCCEEDS(allocator_->begin_save(tags));
  ASSERT_SUCCEEDS(allocator_->detach(tags));
  EXPECT_FAILS(allocator_->detach(tags), Code::kFailedPrecondition, "detached");
  EXPECT_FAILS(allocator_->begin_save(tags), Code::kFailedPrecondition);
  EXPECT_FAILS(allocator_->detach(both_), Code::kFailedPrecondition);  // one of two is asleep: neither moves
  EXPECT_EQ(state("kv_cache"), RegionState::kAttached);
  ASSERT_SUCCEEDS(attach(*allocator_, tags));
  EXPECT_FAILS(allocator_->free(weights_), Code::kFailedPrecondition);
  ASSERT_SUCCEEDS(allocator_->cancel_restore(tags));
  EXPECT_EQ(state("weights"), RegionState::kDetached);
  EXPECT_SUCCEEDS(allocator_->free(weights_));
}

TEST_F(SleepAllocatorTest, UnknownTagsAndBadRegionsAreRefusedByName) {
  EXPECT_FAILS(allocator_->detach(Tags{"wieghts"}), Code::kNotFound, "wieghts");
  EXPECT_FAILS(allocator_->allocate("weights", "a", 1), Code::kInvalidArgument, "weights/a");
  EXPECT_FAILS(allocator_->allocate("", "a", 1), Code::kInvalidArgument);
  EXPECT_FAILS(allocator_->allocate("weights", "z", 0), Code::kInvalidArgument);
  EXPECT_FAILS(allocator_->allocate("weights", "z", UINT64_MAX), Code::kInvalidArgument);
  EXPECT_FAILS(allocator_->free(12345), Code::kNotFound);
}

// A wake that failed, and whose undoing failed: its memory is still there, and trying again works.
TEST_F(SleepAllocatorTest, ACancelledRestoreThatFailsCanBeTriedAgain) {
  ASSERT_SUCCEEDS(allocator_->begin_save(both_));
  ASSERT_SUCCEEDS(allocator_->detach(both_));
  ASSERT_SUCCEEDS(attach(*allocator_, both_));
  device_.fail_at(1);
  EXPECT_FAILS(allocator_->cancel_restore(both_), Code::kDevice);
  device_.fail_at(0);
  EXPECT_EQ(state("weights"), RegionState::kRestoring);
  ASSERT_SUCCEEDS(attach(*allocator_, both_));
  ASSERT_SUCCEEDS(allocator_->finish_restore(both_));
  EXPECT_EQ(state("weights"), RegionState::kAttached);
  at(weights_)[0] = std::byte{1};  // it is mapped
}

// Every device call of a detach fails once: either everything is as it was, or what could not be undone is broken, by
// name.
TEST_F(SleepAllocatorTest, DetachIsAllOrNothingWhereverTheDeviceFails) {
  uint64_t points = 0;
  for (uint64_t n = 1;; ++n) {
    SCOPED_TRACE(n);
    device_.fail_at(n);
    const Status done = allocator_->detach(both_);
    const bool fired = device_.fired();
    device_.fail_at(0);
    if (!fired) {
      EXPECT_SUCCEEDS(done);
      break;
    }
    ++points;
    if (done) continue;
    const bool broken = state("weights") == RegionState::kBroken || state("kv_cache") == RegionState::kBroken;
    EXPECT_EQ(done.error().state_changed, broken);
    if (broken) {  // a release failed: the content is gone, which only the second phase may do
      EXPECT_FAILS(attach(*allocator_, both_), Code::kDevice, "broken");
      break;
    }
    EXPECT_EQ(state("weights"), RegionState::kAttached);
    EXPECT_EQ(state("kv_cache"), RegionState::kAttached);
    expect_content();
  }
  EXPECT_GE(points, 3u);  // three regions are unmapped
}

// Wherever their memory lies: else two runs that do the same fail differently.
TEST_F(SleepAllocatorTest, RegionsAreDetachedInTheOrderInWhichTheyWereAllocated) {
  std::vector<std::string> failed;
  for (uint64_t n = 1; failed.empty() || failed.back() != "kv_cache/kv"; ++n) {
    ASSERT_LT(n, 20u);
    device_.fail_at(n);
    const Status done = allocator_->detach(both_);
    device_.fail_at(0);
    ASSERT_FALSE(done);
    for (const char* region : {"weights/a", "weights/b", "kv_cache/kv"}) {
      if (done.error().what.find(fmt::format("detaching {}", region)) != std::string::npos) failed.push_back(region);
    }
  }
  EXPECT_EQ(failed, (std::vector<std::string>{"weights/a", "weights/b", "kv_cache/kv"}));
}

TEST_F(SleepAllocatorTest, AttachIsAllOrNothingWhereverTheDeviceFailsAndARetryWorks) {
  ASSERT_SUCCEEDS(allocator_->detach(both_));
  uint64_t points = 0;
  for (uint64_t n = 1;; ++n) {
    SCOPED_TRACE(n);
    device_.fail_at(n);
    const Status done = attach(*allocator_, both_);
    const bool fired = device_.fired();
    device_.fail_at(0);
    if (!fired) {
      ASSERT_SUCCEEDS(done);
      break;
    }
    ++points;
    ASSERT_FALSE(done.has_value());
    EXPECT_FALSE(done.error().state_changed);
    EXPECT_EQ(state("weights"), RegionState::kDetached);
    EXPECT_EQ(device_.info().physical_bytes, 0u);
    EXPECT_EQ(device_.info().mapped_bytes, 0u);
  }
  EXPECT_EQ(points, 6u * 2 + 3);  // six handles are created and mapped, three regions get access
  EXPECT_SUCCEEDS(allocator_->finish_restore(both_));
}

TEST_F(SleepAllocatorTest, WhatCannotBeUndoneIsBrokenAndRefusedByName) {
  device_.fail_at(3, /*sticky=*/true);  // after the wait the second unmap fails, and so does mapping the first again
  const Status done = allocator_->detach(both_);
  device_.fail_at(0);
  ASSERT_FALSE(done.has_value());
  EXPECT_TRUE(done.error().state_changed);
  EXPECT_TRUE(state("weights") == RegionState::kBroken || state("kv_cache") == RegionState::kBroken);
  EXPECT_FAILS(allocator_->detach(both_), Code::kDevice, "broken");
  EXPECT_FAILS(allocator_->begin_save(both_), Code::kDevice, "broken");
}

// Memory that the device would not release stays in the books, exactly: nothing is released twice, nothing is
// forgotten.
TEST(SleepAllocator, WhatWasNotReleasedIsReleasedByATryLater) {
  const Tags tags{"weights"};
  uint64_t points = 0;
  for (uint64_t n = 1;; ++n) {
    SCOPED_TRACE(n);
    FaultyDevice device(value_of(make_host_device()));
    const auto allocator = value_of(SleepAllocator::create(device, {.handle_bytes = kUnit}));
    const DeviceAddress first = value_of(allocator->allocate("weights", "a", 3 * kUnit));
    const DeviceAddress second = value_of(allocator->allocate("weights", "b", 3 * kUnit));
    device.fail_at(n);
    const Status done = allocator->detach(tags);
    const bool fired = device.fired();
    device.fail_at(0);
    if (!fired) break;
    ASSERT_FALSE(done.has_value());
    if (!done.error().state_changed) continue;
    ++points;
    EXPECT_EQ(device.info().physical_bytes, kUnit);  // the one that failed, and no other
    EXPECT_EQ(device.info().mapped_bytes, 0u);
    EXPECT_SUCCEEDS(allocator->free(first));
    EXPECT_SUCCEEDS(allocator->free(second));
    EXPECT_EQ(device.info().physical_bytes, 0u);
    EXPECT_EQ(device.info().reserved_bytes, 0u);
  }
  EXPECT_EQ(points, 6u);
}

TEST_F(SleepAllocatorTest, TrimmedMemoryGoesBackItsAddressesStayAndNoSleepHasIt) {
  const DeviceMemoryInfo before = device_.info();
  EXPECT_EQ(value_of(allocator_->trim(weights_)), 3 * kUnit);
  EXPECT_EQ(value_of(allocator_->trim(weights_)), 0u);
  EXPECT_EQ(device_.info().physical_bytes, before.physical_bytes - 3 * kUnit);
  EXPECT_EQ(device_.info().reserved_bytes, before.reserved_bytes);
  EXPECT_FALSE(allocator_->region_at(weights_));
  EXPECT_EQ(allocator_->regions_of("weights").size(), 1u);
  const DeviceAddress again = value_of(allocator_->allocate("weights", "a", kUnit));  // its name is free, it is not
  EXPECT_NE(again, weights_);
  const uint64_t awake = device_.info().physical_bytes;
  ASSERT_SUCCEEDS(allocator_->detach(both_));
  EXPECT_EQ(device_.info().physical_bytes, 0u);
  ASSERT_SUCCEEDS(attach(*allocator_, both_));
  ASSERT_SUCCEEDS(allocator_->finish_restore(both_));
  EXPECT_EQ(device_.info().physical_bytes, awake);
  EXPECT_SUCCEEDS(allocator_->free(weights_));  // the caller is done with the addresses, too
  EXPECT_EQ(device_.info().reserved_bytes, before.reserved_bytes - 3 * kUnit + kUnit);
  EXPECT_FAILS(allocator_->trim(weights_), Code::kNotFound, "no region");
  EXPECT_FAILS(allocator_->allocate("weights", "a", kUnit), Code::kInvalidArgument, "exists");
}

TEST_F(SleepAllocatorTest, WhatIsTrimmedWhileItSleepsDoesNotComeBackAndNothingIsTrimmedWhileItMoves) {
  ASSERT_SUCCEEDS(allocator_->begin_save(both_));
  EXPECT_FAILS(allocator_->trim(weights_), Code::kFailedPrecondition, "saving");
  ASSERT_SUCCEEDS(allocator_->detach(both_));
  EXPECT_EQ(value_of(allocator_->trim(weights_)), 0u);
  ASSERT_SUCCEEDS(allocator_->begin_attach(both_));
  EXPECT_FAILS(allocator_->trim(more_weights_), Code::kFailedPrecondition, "attaching");
  ASSERT_SUCCEEDS(allocator_->attach_region(more_weights_));
  ASSERT_SUCCEEDS(allocator_->attach_region(kv_));
  ASSERT_SUCCEEDS(allocator_->finish_restore(both_));
  EXPECT_EQ(device_.info().physical_bytes, 3 * kUnit);
  EXPECT_SUCCEEDS(allocator_->trim(kv_));  // all that the tag had
  EXPECT_FALSE(allocator_->states().contains("kv_cache"));
  EXPECT_FAILS(allocator_->detach(both_), Code::kNotFound, "kv_cache");
}

TEST_F(SleepAllocatorTest, ATrimThatFailsLeavesAllElseUsableAndATryLaterGivesTheRest) {
  uint64_t points = 0;
  const DeviceMemoryInfo before = device_.info();
  for (uint64_t n = 1;; ++n) {
    SCOPED_TRACE(n);
    const DeviceAddress unused = value_of(allocator_->allocate("weights", "unused", 3 * kUnit));
    device_.fail_at(n);
    const Result<uint64_t> done = allocator_->trim(unused);
    const bool fired = device_.fired();
    device_.fail_at(0);
    if (fired) {
      ++points;
      ASSERT_FALSE(done.has_value());
      EXPECT_FALSE(done.error().state_changed);
      EXPECT_GT(device_.info().physical_bytes, before.physical_bytes);
      EXPECT_EQ(allocator_->regions_of("weights").size(), n == 1 ? 3u : 2u);  // the first call waits for work
    }
    ASSERT_SUCCEEDS(allocator_->begin_save(both_));
    ASSERT_SUCCEEDS(allocator_->cancel_save(both_));
    expect_content();
    if (n % 2 == 0) {
      EXPECT_SUCCEEDS(allocator_->trim(unused));
    }
    EXPECT_SUCCEEDS(allocator_->free(unused));
    EXPECT_EQ(device_.info().physical_bytes, before.physical_bytes);
    EXPECT_EQ(device_.info().reserved_bytes, before.reserved_bytes);
    EXPECT_EQ(device_.info().mapped_bytes, before.mapped_bytes);
    if (!fired) break;
  }
  EXPECT_EQ(points, 1u + 3 + 3);  // a wait, three pieces are unmapped and released
}

TEST_F(SleepAllocatorTest, AllocateUndoesItselfWhereverTheDeviceFails) {
  const DeviceMemoryInfo before = device_.info();
  for (uint64_t n = 1;; ++n) {
    device_.fail_at(n);
    const Result<DeviceAddress> made = allocator_->allocate("extra", "r", 2 * kUnit);
    const bool fired = device_.fired();
    device_.fail_at(0);
    if (!fired) {
      ASSERT_SUCCEEDS(made);
      break;
    }
    ASSERT_FALSE(made.has_value()) << n;
    EXPECT_EQ(device_.info().physical_bytes, before.physical_bytes);
    EXPECT_EQ(device_.info().reserved_bytes, before.reserved_bytes);
    EXPECT_FALSE(allocator_->states().contains("extra"));
  }
}

TEST(SleepAllocator, NotEnoughMemoryOnWakeSaysHowMuchIsNeededAndLaterWorks) {
  const auto device = value_of(make_host_device({.capacity_bytes = 4 * kUnit}));
  const auto allocator = value_of(SleepAllocator::create(*device, {.handle_bytes = kUnit}));
  ASSERT_SUCCEEDS(allocator->allocate("weights", "small", kUnit));
  ASSERT_SUCCEEDS(allocator->allocate("weights", "w", 3 * kUnit));
  const Tags tags{"weights"};
  ASSERT_SUCCEEDS(allocator->detach(tags));
  const PhysicalId other = value_of(device->create(2 * kUnit));  // somebody else took it meanwhile
  EXPECT_FAILS(attach(*allocator, tags), Code::kResourceExhausted, std::to_string(3 * kUnit));
  EXPECT_EQ(allocator->states().at("weights"), RegionState::kDetached);
  EXPECT_EQ(device->info().physical_bytes, 2 * kUnit);  // of what had come nothing is held
  ASSERT_SUCCEEDS(device->release(other));
  EXPECT_SUCCEEDS(attach(*allocator, tags));
}

TEST(SleepAllocator, HandlesMustFitTheGranularity) {
  const auto device = value_of(make_host_device());
  EXPECT_FAILS(SleepAllocator::create(*device, {.handle_bytes = 0}), Code::kInvalidArgument);
  EXPECT_FAILS(SleepAllocator::create(*device, {.handle_bytes = kUnit + 1}), Code::kInvalidArgument, "granularity");
}

}  // namespace
}  // namespace torpor
