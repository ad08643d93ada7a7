// SPDX-License-Identifier: Apache-2.0
// Runs the seeds of the normal test run. More: tools/dev simulate --seeds N.
#include "tests/simulation/simulation.h"

#include <algorithm>
#include <set>

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <boost/filesystem.hpp>

#include "base/log.h"
#include "tests/support/long_run.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor::test {
namespace {

constexpr uint64_t kSeeds = TORPOR_SIMULATION_SEEDS;
constexpr uint64_t kGroups = 10;  // tests that may run in parallel

class Simulation : public ::testing::TestWithParam<uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, Simulation, ::testing::Range(uint64_t{0}, kGroups));

TEST_P(Simulation, I10EveryTokenIsThatOfARunToWhichNothingHappens) {
  log().set_level(LogLevel::kOff);
  const TemporaryDirectory temporary(in_memory());
  SimulationResult sum;
  const uint64_t each = (long_run() ? 1000 : kSeeds) / kGroups;  // seeds in a group
  for (uint64_t seed = GetParam() * each; seed < (GetParam() + 1) * each; ++seed) {
    const std::string directory = fmt::format("{}/{}", temporary.path(), seed);
    boost::filesystem::create_directory(directory);
    boost::filesystem::permissions(directory, boost::filesystem::owner_all);  // whatever the umask
    const SimulationResult result = simulate(seed, directory);
    EXPECT_FALSE(result.failure) << "seed " << seed << ": " << *result.failure << "\nagain: tools/dev simulate --first "
                                 << seed << " --seeds 1 --verbose";
    boost::filesystem::remove_all(directory);
    sum.add(result);
  }
  if (each < 50) return;
  // Everything that this test is about did happen.
  EXPECT_GT(sum.sleeps, 0);
  EXPECT_GT(sum.reused, 0u);
  EXPECT_GT(sum.new_engines, 0);
  EXPECT_GT(sum.checkpoints, 0);
  EXPECT_GT(sum.rewound, 0);
  EXPECT_GT(sum.offloaded, 0);
  EXPECT_GT(sum.onboarded, 0);
  EXPECT_GT(sum.preemptions, 0);
  EXPECT_GT(sum.early, 0);
  EXPECT_GT(sum.early_steps, 0);
  EXPECT_GT(sum.late, 0);
  for (const int runs : sum.regions) EXPECT_GT(runs, 0);
  for (const int runs : sum.tags) EXPECT_GT(runs, 0);
  for (const console::StopEdge edge :
       {console::StopEdge::kBegun, console::StopEdge::kResumed, console::StopEdge::kExpired, console::StopEdge::kGone,
        console::StopEdge::kOperation})
    EXPECT_GT(sum.stops[static_cast<size_t>(edge)], 0) << name(edge);
}

// An engine's inputs determine every byte of its events, with faults, sleeps and new engines.
TEST(SimulationReplay, WhatWasRecordedReplaysEventByEvent) {
  log().set_level(LogLevel::kOff);
  const TemporaryDirectory temporary(in_memory());
  const std::string directory = temporary / "run";
  const auto emptied = [&] {
    boost::filesystem::remove_all(directory);
    boost::filesystem::create_directory(directory);
    boost::filesystem::permissions(directory, boost::filesystem::owner_all);
  };
  uint64_t events = 0;
  std::set<EventType> types;
  const uint64_t seeds = long_run() ? 1000 : kSeeds / 20;
  for (uint64_t seed = 0; seed < std::max<uint64_t>(seeds, 4); ++seed) {
    console::SourceEvents recorded;
    emptied();
    ASSERT_FALSE(simulate(seed, directory, false, &recorded).failure);
    emptied();
    const console::ReplayResult replayed = value_of(replay_simulation(seed, recorded, directory));
    ASSERT_FALSE(replayed.difference) << "seed " << seed << ": event " << replayed.difference->at;
    EXPECT_EQ(replayed.events, recorded.events.size());
    events += replayed.events;
    for (const Event& event : recorded.events) types.insert(event.type);
    if (seed > 0) continue;
    // A change of one bit of one event is found.
    const auto slot = std::find_if(recorded.events.begin(), recorded.events.end(),
                                   [](const Event& event) { return event.type == EventType::kSlot; });
    ASSERT_NE(slot, recorded.events.end());
    slot->b ^= 1;
    emptied();
    const console::ReplayResult other = value_of(replay_simulation(seed, recorded, directory));
    ASSERT_TRUE(other.difference);
    EXPECT_EQ(other.difference->at, static_cast<size_t>(slot - recorded.events.begin()));
  }
  EXPECT_GT(events, 1000u);
  if (seeds < 20) return;
  // A reference engine emits all types but kBlock and kKey, which must be asked for, kCached, which only vLLM's
  // connector emits, and stops, which are off while it is recorded.
  EXPECT_EQ(types, (std::set{EventType::kText, EventType::kStep, EventType::kRequest, EventType::kSlot, EventType::kHit,
                             EventType::kCandidate, EventType::kPlanned, EventType::kEnded, EventType::kRegistered,
                             EventType::kDropped, EventType::kCopy, EventType::kTier, EventType::kOperation,
                             EventType::kPhase, EventType::kEngine, EventType::kInput, EventType::kMemory}));
}

}  // namespace
}  // namespace torpor::test
