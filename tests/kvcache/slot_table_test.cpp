// SPDX-License-Identifier: Apache-2.0
#include "kvcache/slot_table.h"

#include <algorithm>
#include <map>

#include <fmt/core.h>

#include "base/event_ring.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::value_of;
using enum SlotState;
using enum SlotTrigger;

// The whole table: what is not listed is refused.
TEST(SlotStateTable, EveryTransitionAndNoOther) {
  const std::map<SlotTrigger, std::map<SlotState, SlotState>> allowed = {
      {kCreate, {{SlotState::kNone, kInitialized}}},
      {kStage, {{kInitialized, kOnboardStaged}, {kPreempted, kOnboardStaged}, {kOnboardStaged, kOnboardStaged}}},
      {kGiveBack, {{kOnboardStaged, kInitialized}}},
      {kOnboard, {{kOnboardStaged, kOnboarding}}},
      {kOnboardFailed, {{kOnboarding, kInitialized}}},
      {kPrefill,
       {{kInitialized, kPrefilling},
        {kOnboardStaged, kPrefilling},
        {kOnboarding, kPrefilling},
        {kPrefilling, kPrefilling},
        {kSkippedPrefill, kPrefilling},
        {kDecoding, kPrefilling},
        {kSkippedDecode, kPrefilling},
        {kPreempted, kPrefilling}}},
      {kDecode,
       {{kInitialized, kDecoding},
        {kOnboardStaged, kDecoding},
        {kOnboarding, kDecoding},
        {kPrefilling, kDecoding},
        {kSkippedPrefill, kDecoding},
        {kDecoding, kDecoding},
        {kSkippedDecode, kDecoding},
        {kPreempted, kDecoding}}},
      {kSkip,
       {{kInitialized, kInitialized},
        {kOnboardStaged, kOnboardStaged},
        {kOnboarding, kOnboarding},
        {kPrefilling, kSkippedPrefill},
        {kSkippedPrefill, kSkippedPrefill},
        {kDecoding, kSkippedDecode},
        {kSkippedDecode, kSkippedDecode},
        {kPreempted, kPreempted},
        {kFinishing, kFinishing}}},
      {kPreempt,
       {{kOnboarding, kPreempted},
        {kPrefilling, kPreempted},
        {kSkippedPrefill, kPreempted},
        {kDecoding, kPreempted},
        {kSkippedDecode, kPreempted}}},
  };
  for (int t = 0; t < kSlotTriggers; ++t) {
    for (int s = 0; s < kSlotStates; ++s) {
      const auto trigger = static_cast<SlotTrigger>(t);
      const auto state = static_cast<SlotState>(s);
      std::optional<SlotState> expected;
      if (trigger == kFinish || trigger == kEnd) {
        const bool there = state != SlotState::kNone && state != kFinished;
        if (trigger == kEnd && there) expected = kFinished;
        if (trigger == kFinish && there && state != kFinishing) expected = kFinishing;
      } else if (const auto found = allowed.at(trigger).find(state); found != allowed.at(trigger).end()) {
        expected = found->second;
      }
      EXPECT_EQ(next_state(state, trigger), expected) << name(state) << ", " << name(trigger);
    }
  }
}

class SlotTableTest : public testing::Test {
 protected:
  std::string published() {
    std::vector<Event> events;
    reader_.read(events, true);
    std::string text;
    for (const Event& event : events) {
      if (event.type != EventType::kSlot) continue;
      text += fmt::format("{} {} {}/{}, ", event.request, name(static_cast<SlotState>(event.to)), high_of(event.a),
                          low_of(event.a));
    }
    return text;
  }
  std::unique_ptr<EventRing> ring_ = value_of(EventRing::in_memory({}, 64));
  EventReader reader_{*ring_};
  SlotTable table_{EventPort(*ring_, system_clock())};
};

TEST_F(SlotTableTest, ARequestsLifeIsToldByItsChanges) {
  const uint32_t slot = value_of(table_.create("r", 10));
  ASSERT_SUCCEEDS(table_.stage(slot, 2));
  ASSERT_SUCCEEDS(table_.onboard(slot, 2));
  ASSERT_SUCCEEDS(table_.scheduled(slot, 4, 4, 10));
  ASSERT_SUCCEEDS(table_.scheduled(slot, 8, 2, 10));
  ASSERT_SUCCEEDS(table_.scheduled(slot, 10, 1, 11));
  ASSERT_SUCCEEDS(table_.scheduled(slot, 11, 1, 12));
  ASSERT_SUCCEEDS(table_.skip(slot));
  ASSERT_SUCCEEDS(table_.preempt(slot));
  ASSERT_SUCCEEDS(table_.finish(slot, true));
  ASSERT_SUCCEEDS(table_.end(slot));
  EXPECT_EQ(published(),
            "1 initialized 0/10, 1 onboard staged 0/10, 1 onboarding 0/10, 1 prefilling 8/10, 1 decoding 11/11, "
            "1 skipped decode 12/12, 1 preempted 0/12, 1 finishing 0/12, 1 finished 0/12, ");
  EXPECT_EQ(table_.size(), 0u);
}

TEST_F(SlotTableTest, HowFarItCameIsToldEverySoManyTokens) {
  const uint32_t slot = value_of(table_.create("r", 10));
  ASSERT_SUCCEEDS(table_.scheduled(slot, 0, 10, 10));
  for (int64_t token = 10; token < 10 + 2 * SlotTable::kPublishedEvery; ++token)
    ASSERT_SUCCEEDS(table_.scheduled(slot, token, 1, token + 1));
  EXPECT_EQ(published(), "1 initialized 0/10, 1 prefilling 10/10, 1 decoding 11/11, 1 decoding 75/75, ");
}

TEST_F(SlotTableTest, WhatTheTableDoesNotHaveIsRefusedAndChangesNothing) {
  EXPECT_FAILS(table_.create("", 4), Code::kInvalidArgument);
  EXPECT_FAILS(table_.create("r", 0), Code::kInvalidArgument, "0 tokens");
  EXPECT_FAILS(table_.skip(0), Code::kNotFound, "slot 0");
  const uint32_t slot = value_of(table_.create("r", 4));
  EXPECT_FAILS(table_.onboard(slot, 3), Code::kFailedPrecondition, "request r is initialized: it cannot onboard");
  EXPECT_EQ(table_.at(slot).device_blocks, 0);
  ASSERT_SUCCEEDS(table_.scheduled(slot, 0, 4, 4));
  EXPECT_FAILS(table_.stage(slot, 3), Code::kFailedPrecondition, "prefilling");
  EXPECT_EQ(table_.at(slot).staged_blocks, 0);
  ASSERT_SUCCEEDS(table_.finish(slot));
  EXPECT_FAILS(table_.finish(slot), Code::kNotFound);
  EXPECT_EQ(value_of(table_.create("other", 4)), slot);
}

// Whoever begins to read late finds each request that is there.
TEST_F(SlotTableTest, AllAreToldAnewBeforeTheRingForgetsThem) {
  const uint32_t old = value_of(table_.create("old", 4));
  ASSERT_SUCCEEDS(table_.scheduled(old, 0, 4, 4));
  for (int step = 0; step < 1000; ++step) table_.step(1, 0, 1, 5);
  std::vector<Event> events;
  EventReader(*ring_).read(events, true);
  EXPECT_TRUE(std::any_of(events.begin(), events.end(),
                          [](const Event& event) { return event.type == EventType::kText && event.request == 1; }));
  EXPECT_TRUE(std::any_of(events.begin(), events.end(), [](const Event& event) {
    return event.type == EventType::kSlot && static_cast<SlotState>(event.to) == kPrefilling;
  }));
}

}  // namespace
}  // namespace torpor
