// SPDX-License-Identifier: Apache-2.0
// A tag that one rank has and another does not, and a tag whose last region goes while an operation is under way.
#include <fmt/format.h>

#include <algorithm>

#include "tests/engine/sleep_failure.h"

namespace torpor {
namespace {

using namespace test;

// No region is allocated while the engine sleeps, so that a sleep leaves nothing on the device.
TestEngineOptions of_ranks(int ranks) {
  TestEngineOptions options{.ranks = ranks};
  options.exchange_asleep = false;
  return options;
}

// The parameter is the rank that has the tag.
class TagOfOneRank : public SleepFailure, public ::testing::WithParamInterface<int> {
 protected:
  static constexpr const char* kTag = "extra";
  static constexpr uint64_t kBytes = 64 * kKiB;

  static RankMemory& memory(SleepingEngine& slept) { return slept.engine.memory(GetParam()); }
  static std::byte* add_tag(SleepingEngine& slept, const char* tag = kTag) {
    const DeviceAddress address = value_of(memory(slept).allocate(tag, "only", kBytes));
    auto* const bytes = reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
    std::fill_n(bytes, kBytes, std::byte{0x5a});
    return bytes;
  }
  static void expect_content(const std::byte* bytes) {
    EXPECT_EQ(std::count(bytes, bytes + kBytes, std::byte{0x5a}), static_cast<std::ptrdiff_t>(kBytes));
  }
  static void expect_no_device_memory(SleepingEngine& slept) {
    for (const int rank : {0, 1}) EXPECT_EQ(slept.engine.device(rank).info().physical_bytes, 0u) << rank;
  }
  static TestEngine::Tokens expected() { return uninterrupted(of_ranks(2)); }
};

TEST_P(TagOfOneRank, SleepsAndWakesWithTheOthers) {
  SleepingEngine slept = make(of_ranks(2));
  begin(slept.engine);
  const std::byte* const content = add_tag(slept);
  add_tag(slept, kWorkspaceTag);
  ASSERT_SUCCEEDS(slept.controller.sleep(to_host()));
  expect_no_device_memory(slept);
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  expect_content(content);
  EXPECT_EQ(finish(slept.engine), expected());
}

TEST_P(TagOfOneRank, MayBeNamed) {
  SleepingEngine slept = make(of_ranks(2));
  begin(slept.engine);
  const std::byte* const content = add_tag(slept);
  const SleepOptions only{.preserve_state = true, .tags = {kTag}};
  EXPECT_EQ(value_of(slept.controller.plan_sleep(only)).free_bytes.at(kTag), kBytes);
  EXPECT_EQ(value_of(slept.controller.sleep(only)).freed_bytes, kBytes);
  ASSERT_SUCCEEDS(slept.controller.wake_up({}));
  expect_content(content);
  EXPECT_EQ(finish(slept.engine), expected());
}

TEST_P(TagOfOneRank, IsInACheckpoint) {
  SleepingEngine slept = make(of_ranks(2));
  begin(slept.engine);
  add_tag(slept);
  ASSERT_SUCCEEDS(slept.controller.checkpoint(Value{}));
  const SleepReport report = value_of(slept.controller.sleep(to_disk()));
  expect_no_device_memory(slept);
  SleepingEngine woken = make(of_ranks(2));
  ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = report.checkpoint}));
  woken.engine.go_on_after(slept.engine);
  EXPECT_EQ(finish(woken.engine), expected());
}

TEST_P(TagOfOneRank, IsSwapped) {
  SleepingEngine from = make(of_ranks(2));
  begin(from.engine);
  SleepingEngine to = make(of_ranks(2));
  begin(to.engine);
  const std::byte* const content = add_tag(from);
  add_tag(to);
  ASSERT_SUCCEEDS(to.controller.sleep(to_host()));
  ASSERT_SUCCEEDS(SleepController::swap(from.controller, to.controller, {}));
  expect_no_device_memory(from);
  EXPECT_EQ(finish(to.engine), expected());
  ASSERT_SUCCEEDS(to.controller.sleep(to_host()));
  ASSERT_SUCCEEDS(from.controller.wake_up({}));
  expect_content(content);
  EXPECT_EQ(finish(from.engine), expected());
}

// The weights of a rank of a pipeline may all be on the other one.
TEST_P(TagOfOneRank, MayBeTheWeightsOfACheckpoint) {
  const auto without_weights = [](SleepingEngine& engine) {
    RankMemory& other = engine.engine.memory(1 - GetParam());
    for (const RegionInfo& region : other.allocator().regions_of(kWeightsTag))
      ASSERT_SUCCEEDS(other.free(region.address));
  };
  SleepingEngine slept = make(of_ranks(2));
  without_weights(slept);
  const SleepReport report = value_of(slept.controller.sleep(to_disk()));
  expect_no_device_memory(slept);
  SleepingEngine woken = make(of_ranks(2));
  without_weights(woken);
  ASSERT_SUCCEEDS(woken.controller.wake_up({.from_checkpoint = report.checkpoint}));
}

INSTANTIATE_TEST_SUITE_P(Ranks, TagOfOneRank, ::testing::Values(0, 1));

class TagThatGoes : public SleepFailure {};

TEST_F(TagThatGoes, DuringASleepIsLeftOut) {
  struct Case {
    const char* tag;
    const char* hook;
  };
  for (const Case& at :
       {Case{"extra", "capture"}, Case{kWorkspaceTag, "capture"}, Case{kWorkspaceTag, "release_derived"}}) {
    SCOPED_TRACE(fmt::format("{} at {}", at.tag, at.hook));
    SleepingEngine slept = make(of_ranks(1));
    begin(slept.engine);
    RankMemory& memory = slept.engine.memory(0);
    const DeviceAddress address = value_of(memory.allocate(at.tag, "only", 64 * kKiB));
    slept.engine.before_hook = [&](const std::string& hook) {
      if (hook != at.hook || !memory.allocator().region_at(address)) return;
      ASSERT_SUCCEEDS(memory.free(address));
    };
    ASSERT_SUCCEEDS(slept.controller.sleep(to_host()));
    EXPECT_EQ(slept.engine.device().info().physical_bytes, 0u);
    ASSERT_SUCCEEDS(slept.controller.wake_up({}));
    EXPECT_EQ(finish(slept.engine), uninterrupted(of_ranks(1)));
  }
}

TEST_F(TagThatGoes, DuringASwapIsLeftOut) {
  for (const char* const tag : {"extra", kWorkspaceTag}) {
    SCOPED_TRACE(tag);
    SleepingEngine from = make(of_ranks(1));
    SleepingEngine to = make(of_ranks(1));
    begin(from.engine);
    begin(to.engine);
    ASSERT_SUCCEEDS(to.controller.sleep(to_host()));
    RankMemory& memory = from.engine.memory(0);
    const DeviceAddress address = value_of(memory.allocate(tag, "only", kMiB));
    from.engine.before_hook = [&](const std::string& hook) {
      if (hook != "release_derived" || !memory.allocator().region_at(address)) return;
      ASSERT_SUCCEEDS(memory.free(address));
    };
    ASSERT_SUCCEEDS(SleepController::swap(from.controller, to.controller, {}));
    EXPECT_EQ(finish(to.engine), uninterrupted(of_ranks(1)));
  }
}

TEST_F(TagThatGoes, WhatReleaseDerivedFreesIsNotPromisedToTheOtherEngine) {
  SleepingEngine from = make(of_ranks(1));
  SleepingEngine to = make(of_ranks(1));
  begin(from.engine);
  begin(to.engine);
  (void)value_of(to.engine.memory(0).allocate("extra", "more", 2 * kMiB));
  ASSERT_SUCCEEDS(to.controller.sleep(to_host()));
  (void)value_of(from.engine.memory(0).allocate("extra", "stays", 64 * kKiB));
  const DeviceAddress unused = value_of(from.engine.memory(0).allocate("extra", "goes", 4 * kMiB));
  from.engine.before_hook = [&](const std::string& hook) {
    if (hook != "release_derived") return;
    EXPECT_EQ(value_of(from.engine.memory(0).trim(unused)), 4 * kMiB);
  };
  ASSERT_SUCCEEDS(SleepController::swap(from.controller, to.controller, {}));
  EXPECT_EQ(finish(to.engine), uninterrupted(of_ranks(1)));
}

// The requests would lose their KV unnoticed.
TEST_F(TagThatGoes, IsMissedIfItWasTheKvCache) {
  SleepingEngine slept = make(of_ranks(2));
  begin(slept.engine);
  slept.engine.before_hook = [&](const std::string& hook) {
    RankMemory& memory = slept.engine.memory(1);
    if (hook != "capture") return;
    for (const RegionInfo& region : memory.allocator().regions_of(kKvCacheTag))
      ASSERT_SUCCEEDS(memory.free(region.address));
  };
  const Result<SleepReport> report = slept.controller.sleep(to_host());
  ASSERT_FALSE(report);
  EXPECT_EQ(report.error().code, Code::kNotFound) << report.error().to_string();
  EXPECT_FALSE(report.error().state_changed);
  EXPECT_EQ(slept.controller.state().engine, "awake");
}

}  // namespace
}  // namespace torpor
