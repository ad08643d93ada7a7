// SPDX-License-Identifier: Apache-2.0
// Recordings of a reference engine that goes through offloading, a sleep and a new engine: replayed, compared, damaged.
// Seeds by the hundred: tests/simulation.
#include "console/replay.h"

#include <fmt/core.h>

#include "console/event_text.h"
#include "console/recording_diff.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor::console {
namespace {

using namespace std::chrono_literals;
using test::value_of;

class ReplayTest : public testing::Test {
 protected:
  RunHost host(const char* name) { return {.files = linux_file_system(), .directory = temporary_ / name}; }
  SourceEvents record(const char* name, int32_t host_blocks = 40) {
    const auto ring = value_of(EventRing::in_memory({.role = "core"}, 1 << 14));
    RunClock clock;
    ReferenceRun run(host(name), *ring, clock);
    RunOptions options;
    options.engine.num_blocks = 24;
    options.engine.transfers_have_threads = false;
    options.engine.tiers = {.host_blocks = host_blocks};
    EXPECT_SUCCEEDS(run.begin(options));
    for (int i = 0; i < 6; ++i)
      EXPECT_SUCCEEDS(run.add({.id = fmt::format("chat-{}", i),
                               .prompt = std::vector<int32_t>(static_cast<size_t>(9 + 4 * i), i % 3),
                               .max_tokens = 20}));
    std::string checkpoint;
    for (int i = 0; i < 400 && !run.engine().idle(); ++i) {
      clock.set(clock.now() + 3ms);
      (void)run.step();
      (void)run.step_offload();
      if (i == 5) {
        EXPECT_TRUE(run.abort("chat-5"));
      }
      if (i == 10) {
        EXPECT_SUCCEEDS(run.sleep({.level = 1, .preserve_state = true}));
        EXPECT_SUCCEEDS(run.wake({}));
      }
      if (i == 20) {
        checkpoint = value_of(run.sleep({.level = 1, .preserve_state = true, .to_disk = true})).checkpoint;
        EXPECT_SUCCEEDS(run.begin(options));
        EXPECT_SUCCEEDS(run.wake({.from_checkpoint = checkpoint}));
      }
    }
    EXPECT_TRUE(run.engine().idle());
    SourceEvents recorded{.source = ring->source(), .path = name};
    EventReader reader(*ring);
    reader.read(recorded.events, true);
    recorded.lost = reader.lost();
    return recorded;
  }
  const test::TemporaryDirectory temporary_{test::in_memory()};
};

TEST_F(ReplayTest, EveryEventIsEqual) {
  const SourceEvents recorded = record("a");
  const ReplayResult result = value_of(replay(recorded, host("b")));
  ASSERT_FALSE(result.difference) << result.difference->at;
  EXPECT_EQ(result.events, recorded.events.size());
  EXPECT_GT(result.inputs, 50u);
  EXPECT_GT(result.events, 300u);
}

TEST_F(ReplayTest, TheFirstEventThatDiffersIsFound) {
  SourceEvents recorded = record("a");
  for (size_t at = 0; at < recorded.events.size(); at += 37) {
    if (recorded.events[at].type == EventType::kInput || recorded.events[at].type == EventType::kText) continue;
    SourceEvents other = recorded;
    other.events[at].b ^= 1;
    const ReplayResult result = value_of(replay(other, host(fmt::format("b{}", at).c_str())));
    ASSERT_TRUE(result.difference);
    EXPECT_EQ(result.difference->at, at);
  }
  recorded.events.push_back(recorded.events.back());
  const ReplayResult result = value_of(replay(recorded, host("c")));
  ASSERT_TRUE(result.difference);
  EXPECT_FALSE(result.difference->replayed);
}

// A recorder is interrupted, or its engine is killed, between any two events.
TEST_F(ReplayTest, WhereTheRecordingEndsIsNoDifference) {
  const SourceEvents recorded = record("a");
  for (size_t count = 1; count < recorded.events.size(); count += count < 60 ? 1 : 7) {
    SourceEvents cut = recorded;
    cut.events.resize(count);
    const ReplayResult result = value_of(replay(cut, host(fmt::format("b{}", count).c_str())));
    ASSERT_FALSE(result.difference) << count;
    // All but an input whose words are not there.
    for (uint64_t at = result.events; at < count; ++at)
      EXPECT_EQ(cut.events[at].type, at == result.events ? EventType::kInput : EventType::kText) << count;
  }
}

TEST_F(ReplayTest, WhatCannotBeReplayedSaysWhy) {
  SourceEvents recorded = record("a");
  SourceEvents other = recorded;
  std::erase_if(other.events, [](const Event& event) { return event.type == EventType::kInput; });
  EXPECT_FAILS(replay(other, host("b")), Code::kFailedPrecondition, "no inputs");
  other = recorded;
  other.events.erase(other.events.begin());
  EXPECT_FAILS(replay(other, host("b")), Code::kFailedPrecondition, "missing");
  other = recorded;
  other.lost = 1;
  EXPECT_FAILS(replay(other, host("b")), Code::kFailedPrecondition, "missing");
  other = recorded;
  other.events.push_back({.type = EventType::kStop});
  EXPECT_FAILS(replay(other, host("b")), Code::kFailedPrecondition, "stopped");
}

// Any bytes may stand in a recording: the replay ends with an error or a difference, and takes no memory for them.
TEST_F(ReplayTest, InputsAreNotBelieved) {
  const SourceEvents recorded = record("a");
  const auto with = [&](const std::string& words) {
    const auto ring = value_of(EventRing::in_memory({}, 1 << 12));
    RunClock clock;
    const EventPort port(*ring, clock);
    const uint64_t number = port.record({.type = EventType::kInput, .from = static_cast<uint8_t>(InputKind::kEngine)});
    port.text(TextKind::kInput, 0, number, words);
    SourceEvents other{.source = ring->source()};
    EventReader(*ring).read(other.events, true);
    return replay(other, host("b"));
  };
  EXPECT_FAILS(with("{}"), Code::kCorruption);
  EXPECT_FAILS(with("[1,2,3]"), Code::kCorruption);
  EXPECT_FAILS(with("{\"ranks\":1000000}"), Code::kCorruption);
  EventTexts texts;
  std::string options;
  for (size_t i = 1; options.empty(); ++i) {
    if (const auto text = texts.add(recorded.events[i])) options = text->words;
  }
  EXPECT_TRUE(value_of(with(options)).difference || value_of(with(options)).inputs == 1);
  for (const std::string field : {"\"ranks\":1", "\"num_blocks\":24", "\"weight_bytes\":16384", "\"host_blocks\":40"}) {
    std::string huge = options;
    ASSERT_NE(huge.find(field), std::string::npos) << field << options;
    huge.insert(huge.find(field) + field.size(), "00000000");
    EXPECT_FAILS(with(huge), Code::kCorruption) << field;
  }
}

TEST_F(ReplayTest, ADiffSaysWhereTwoRecordingsPartAndWhatBecameOfIt) {
  const SourceEvents a = record("a");
  EXPECT_EQ(diff_recordings(a, record("b"))["equal"], true);
  const auto json = diff_recordings(a, record("c", 4));
  EXPECT_EQ(json["equal"], false);
  EXPECT_FALSE(json["differences"].empty());
  EXPECT_FALSE(json["first_difference"]["a"].empty());
  EXPECT_FALSE(json["times"].empty());
}

}  // namespace
}  // namespace torpor::console
