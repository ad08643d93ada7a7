// SPDX-License-Identifier: Apache-2.0
// What a program without a controller tells of its memory: who has how much of it, after each sleep and wake.
#include "allocator/host_device.h"
#include "base/event_ring.h"
#include "engine/memory_saver.h"
#include "engine/phases.h"
#include "tests/support/manual_clock.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::value_of;

TEST(MemorySaverEvents, EachSleepAndWakeTellsWhoHasWhat) {
  const auto ring = value_of(EventRing::in_memory({}, 256));
  test::ManualClock clock;
  MemorySaver saver([&](int ordinal) -> Result<std::unique_ptr<RankMemory>> {
    return RankMemory::create(value_of(make_host_device()), linux_file_system(),
                              {.rank = ordinal, .threads = 1, .own_threads = false, .events = {*ring, clock}});
  });
  MemorySaver::scopes() = {{.tag = "weights"}};
  const DeviceAddress address = value_of(saver.allocate(0, 1 << 20));
  EventReader reader(*ring);
  const auto device_bytes = [&](Edge edge, std::string_view operation) {
    std::vector<Event> events;
    reader.read(events, true);
    uint64_t found = UINT64_MAX;
    bool published = false;
    for (const Event& event : events) {
      published = published || (event.type == EventType::kOperation && event.to == static_cast<uint8_t>(edge) &&
                                kOperationNames[event.from] == operation);
      if (event.type == EventType::kMemory && event.from == static_cast<uint8_t>(MemoryPart::kTag) && event.to == 0)
        found = event.a;
    }
    EXPECT_TRUE(published) << operation;
    return found;
  };
  (void)value_of(saver.sleep({"weights"}));
  EXPECT_EQ(device_bytes(Edge::kEnd, "sleep"), 0u);
  EXPECT_FALSE(saver.sleep({"weights"}));  // nothing of it is awake, and nothing is told
  EXPECT_EQ(ring->last_sequence(), reader.next() - 1);
  (void)value_of(saver.plan_wake({"weights"}));
  EXPECT_EQ(ring->last_sequence(), reader.next() - 1);
  (void)value_of(saver.wake({"weights"}));
  EXPECT_GE(device_bytes(Edge::kEnd, "wake"), uint64_t{1} << 20);
  ASSERT_SUCCEEDS(saver.free(0, address));
  MemorySaver::scopes().clear();
}

}  // namespace
}  // namespace torpor
