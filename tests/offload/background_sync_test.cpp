// SPDX-License-Identifier: Apache-2.0
// What is put is made safe while the store is used.
#include "offload/background_sync.h"

#include "tests/offload/disk_world.h"

namespace torpor {
namespace {

using namespace test;
using namespace std::chrono_literals;

// Waits at most a minute.
bool becomes(const std::function<bool()>& true_at_last) {
  const auto end = std::chrono::steady_clock::now() + 60s;
  while (!true_at_last() && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(1ms);
  return true_at_last();
}

TEST(BackgroundSync, WhatIsPutIsSafeSoonWithoutAWordOfItsOwner) {
  DiskWorld world;
  const TemporaryDirectory elsewhere;
  const auto leases = value_of(linux_file_system().open_directory(elsewhere / "leases", true));
  const StoreSlot slot = world.fresh(1).front();
  ASSERT_SUCCEEDS(put_one(world.store(), slot, 1));
  EXPECT_FAILS(world.store().lease({&slot, 1}, *leases), Code::kFailedPrecondition, "not synced");
  const auto sync = value_of(BackgroundSync::start(world.store(), 1ms));
  EXPECT_TRUE(becomes([&] { return world.store().lease({&slot, 1}, *leases).has_value(); }));
  const uint64_t calls = world.files.plan.calls;
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(world.files.plan.calls, calls);  // there was nothing new
}

TEST(BackgroundSync, WhatCannotBeMadeSafeIsDroppedAndCounted) {
  DiskWorld world;
  const StoreSlot slot = world.fresh(1).front();
  ASSERT_SUCCEEDS(put_one(world.store(), slot, 1));
  ASSERT_TRUE(world.fail(true));
  {
    const auto sync = value_of(BackgroundSync::start(world.store(), 1ms));
    EXPECT_TRUE(becomes([&] { return world.store().health().sync_errors > 0; }));
  }
  world.fail(false);
  EXPECT_FAILS(has_one(world.store(), slot, 1), Code::kNotFound);
}

// One that was killed lets go of its lock only when the system has taken it down.
TEST(SegmentStore, AnEndingProcessIsWaitedFor) {
  DiskWorld world;
  EXPECT_FAILS(world.another(), Code::kUnavailable, "another process is using");
  world.options().lock_wait = 10s;
  std::thread ending([&] {
    std::this_thread::sleep_for(50ms);
    world.end();
  });
  EXPECT_SUCCEEDS(world.another());
  ending.join();
}

}  // namespace
}  // namespace torpor
