// SPDX-License-Identifier: Apache-2.0
// Requests whose hits can be counted by hand, in tiers of chosen sizes.
#include "console/model_replay.h"

#include <fmt/core.h>

#include "kvcache/slot_table.h"
#include "tests/support/results.h"

namespace torpor::console {
namespace {

using test::value_of;

class ModelReplayTest : public testing::Test {
 protected:
  // A request whose prompt has these blocks and which makes `made` more.
  void ask(const std::vector<std::string>& prompt, const std::vector<std::string>& made = {}) {
    const uint32_t slot = value_of(table_.create(fmt::format("r{}", ++count_), 1));
    EXPECT_SUCCEEDS(table_.keys(slot, views(prompt), 0, KeyOf::kPrompt));
    if (!made.empty()) {
      EXPECT_SUCCEEDS(table_.keys(slot, views(made), prompt.size(), KeyOf::kMade));
    }
    EXPECT_SUCCEEDS(table_.finish(slot));
  }
  ModelResult found(const TierSizes& sizes) { return value_of(replay_in_model(recording(), sizes)); }
  SourceEvents recording() {
    SourceEvents all;
    EventReader(*ring_).read(all.events, true);
    return all;
  }
  static std::vector<std::string_view> views(const std::vector<std::string>& of) { return {of.begin(), of.end()}; }

  const std::unique_ptr<EventRing> ring_ = value_of(EventRing::in_memory({}, 1 << 12));
  SlotTable table_{EventPort(*ring_, system_clock())};
  int count_ = 0;
};

TEST_F(ModelReplayTest, WhatIsFoundDependsOnTheSizeOfTheTiers) {
  for (int round = 0; round < 3; ++round) {
    for (const std::string chat : {"a", "b", "c", "d"}) ask({chat + "1", chat + "2"});
  }
  // Eight blocks go round: less room than that finds none of them, as they go by use.
  const ModelResult small = found({.device = 6});
  EXPECT_EQ(small.requests, 12u);
  EXPECT_EQ(small.asked, 24u);
  EXPECT_EQ(small.found.device, 0);
  EXPECT_EQ(found({.device = 8}).found.device, 16);
  const ModelResult below = found({.device = 2, .host = 8});
  EXPECT_EQ(below.found.device, 0);
  EXPECT_EQ(below.found.host, 16);
  const ModelResult disk = found({.device = 2, .host = 4, .disk = 64});
  EXPECT_EQ(disk.found.host, 0);
  EXPECT_EQ(disk.found.disk, 16);
  EXPECT_EQ(found({}).found.device, 0);
}

TEST_F(ModelReplayTest, WhatARequestMadeIsFoundByTheNextTurn) {
  ask({"a1"}, {"a2", "a3"});
  ask({"a1", "a2", "a3", "a4"});
  EXPECT_EQ(found({.host = 16}).found.host, 3);
}

// A hole in a chain: what is behind it stands on nothing.
TEST_F(ModelReplayTest, KeysThatAreMissingAreNobodys) {
  ask({"a1", "a2", "a3"});
  ask({"a1", "a2", "a3"});
  SourceEvents all = recording();
  const auto second = std::find_if(all.events.begin(), all.events.end(),
                                   [](const Event& event) { return event.type == EventType::kKey && event.a == 1; });
  all.events.erase(second);
  const ModelResult result = value_of(replay_in_model(all, {.host = 16}));
  EXPECT_EQ(result.requests, 1u);
  EXPECT_EQ(result.found.host, 0);
}

TEST_F(ModelReplayTest, WithoutKeysOrWithSizesOfNoSenseItSaysSo) {
  EXPECT_FAILS(replay_in_model(recording(), {.host = 4}), Code::kFailedPrecondition, "keys");
  ask({"a"});
  EXPECT_FAILS(replay_in_model(recording(), {.host = -2}), Code::kInvalidArgument, "-2");
  EXPECT_FAILS(replay_in_model(recording(), {.disk = int64_t{1} << 40}), Code::kInvalidArgument);
}

TEST_F(ModelReplayTest, SizesAndHitsAreThoseThatWereTold) {
  const EventPort port(*ring_, system_clock());
  (void)port.record({.type = EventType::kTier, .from = 1, .a = both(3, 1), .b = both(10, 7)});
  (void)port.record({.type = EventType::kHit, .request = 1, .a = 9, .b = both(5, 2)});
  EXPECT_EQ(recorded_sizes(recording()).host, 20);
  EXPECT_EQ(recorded_sizes(recording()).disk, 0);
  EXPECT_EQ(recorded_hits(recording()).host, 5u);
  EXPECT_EQ(recorded_hits(recording()).disk, 2u);
}

}  // namespace
}  // namespace torpor::console
