// SPDX-License-Identifier: Apache-2.0
#include "tools/torpor/pair_plan.h"

#include <gtest/gtest.h>

namespace torpor::cli {

namespace {

constexpr PairStart kStandby0{.which = 0, .as_standby = true}, kStandby1{.which = 1, .as_standby = true};
constexpr PairStart kOwner0{.which = 0, .as_standby = false}, kOwner1{.which = 1, .as_standby = false};

// One that has ended at 100 s.
PairedServer ended(bool owned, int ended_early = 0) {
  return {.state = ServerState::kNone, .owned = owned, .ended_at = 100, .ended_early = ended_early};
}
PairedServer in(ServerState state) { return {.state = state}; }

TEST(PairPlan, TheStandbyStartsFirstAndTheOwnerWhenThatSleeps) {
  EXPECT_TRUE(next_start({PairedServer{}, PairedServer{}}, 1) == kStandby0);
  EXPECT_FALSE(next_start({in(ServerState::kStarting), PairedServer{}}, 1));
  EXPECT_TRUE(next_start({in(ServerState::kStandby), PairedServer{}}, 1) == kOwner1);
  EXPECT_FALSE(next_start({in(ServerState::kStandby), in(ServerState::kStarting)}, 1));
  EXPECT_FALSE(next_start({in(ServerState::kStandby), in(ServerState::kOwns)}, 1));
}

TEST(PairPlan, AnOwnerThatEndedComesBackAsTheStandbyOnceTheOtherOneServes) {
  EXPECT_FALSE(next_start({in(ServerState::kStandby), ended(true)}, 100.1));
  EXPECT_FALSE(next_start({in(ServerState::kTakingOver), ended(true)}, 100.2));
  EXPECT_TRUE(next_start({in(ServerState::kOwns), ended(true)}, 100.5) == kStandby1);
}

TEST(PairPlan, AnOwnerWhoseEndNobodyNoticesIsStartedAgain) {
  EXPECT_FALSE(next_start({in(ServerState::kStandby), ended(true)}, 109));
  EXPECT_TRUE(next_start({in(ServerState::kStandby), ended(true)}, 111) == kOwner1);
}

TEST(PairPlan, AnOwnerThatEndedBeforeItOwnedIsStartedAgainAfterAPauseThatGrows) {
  EXPECT_FALSE(next_start({in(ServerState::kStandby), ended(false, 1)}, 100.5));
  EXPECT_TRUE(next_start({in(ServerState::kStandby), ended(false, 1)}, 101.5) == kOwner1);
  EXPECT_FALSE(next_start({in(ServerState::kStandby), ended(false, 4)}, 107));
  EXPECT_TRUE(next_start({in(ServerState::kStandby), ended(false, 4)}, 109) == kOwner1);
  EXPECT_FALSE(next_start({in(ServerState::kStandby), ended(false, 40)}, 129));
  EXPECT_TRUE(next_start({in(ServerState::kStandby), ended(false, 40)}, 131) == kOwner1);
}

TEST(PairPlan, AStandbyThatEndedComesBackBesideAnOwner) {
  EXPECT_TRUE(next_start({ended(false), in(ServerState::kOwns)}, 100.1) == kStandby0);
  EXPECT_FALSE(next_start({ended(false), in(ServerState::kStarting)}, 100.1));
  EXPECT_FALSE(next_start({ended(false), in(ServerState::kEnding)}, 100.1));
  EXPECT_FALSE(next_start({ended(false), in(ServerState::kFailed)}, 100.1));
}

TEST(PairPlan, WhereBothEndedItBeginsAnew) {
  EXPECT_TRUE(next_start({ended(true), ended(true)}, 100.1) == kStandby0);
  EXPECT_TRUE(next_start({in(ServerState::kStandby), ended(true)}, 120) == kOwner1);
  EXPECT_TRUE(next_start({ended(true), in(ServerState::kStandby)}, 120) == kOwner0);
}

// After a switch that failed: the owner has ended its standby, and cannot go on itself.
TEST(PairPlan, AnOwnerThatServedAndFailedIsEndedAndBothStartAnew) {
  const PairedServer failed{.state = ServerState::kFailed, .owned = true};
  EXPECT_TRUE(is_to_end(failed));
  EXPECT_TRUE(is_to_end({.state = ServerState::kFailed, .as_standby = true, .owned = true}));  // it had taken over
  EXPECT_FALSE(next_start({failed, ended(false)}, 200));                                       // not beside it
  EXPECT_TRUE(next_start({ended(true), ended(false)}, 200) == kStandby0);
  EXPECT_TRUE(next_start({in(ServerState::kStandby), ended(true)}, 200) == kOwner1);
}

TEST(PairPlan, AFailedStandbyIsEndedAndAnOwnerThatFailedAtItsStartStays) {
  EXPECT_TRUE(is_to_end({.state = ServerState::kFailed, .as_standby = true}));
  EXPECT_FALSE(is_to_end({.state = ServerState::kFailed}));
  for (const ServerState state : {ServerState::kNone, ServerState::kStarting, ServerState::kStandby,
                                  ServerState::kTakingOver, ServerState::kOwns, ServerState::kEnding})
    EXPECT_FALSE(is_to_end({.state = state, .as_standby = true, .owned = true}));
}

// After a switch.
TEST(PairPlan, AnOwnerThatEndsIsLeftOverOnceTheOtherOneOwns) {
  const PairedServer ends{.state = ServerState::kEnding, .owned = true};
  const PairedServer owns{.state = ServerState::kOwns, .as_standby = true, .owned = true};
  EXPECT_TRUE(is_left_over(ends, owns));
  EXPECT_FALSE(is_owner(ends, owns));
  EXPECT_TRUE(is_owner(owns, ends));
  EXPECT_FALSE(is_left_over(owns, ends));
  EXPECT_FALSE(next_start({ends, owns}, 200));  // a standby starts when it is gone
}

TEST(PairPlan, AnOwnerThatWritesItsCheckpointEndsLast) {
  const PairedServer ends{.state = ServerState::kEnding, .owned = true};
  for (const ServerState state : {ServerState::kNone, ServerState::kStarting, ServerState::kStandby,
                                  ServerState::kTakingOver, ServerState::kFailed, ServerState::kEnding}) {
    const PairedServer other{.state = state, .as_standby = true};
    EXPECT_TRUE(is_owner(ends, other));
    EXPECT_FALSE(is_left_over(ends, other));
    EXPECT_FALSE(is_owner(other, ends));
  }
  EXPECT_TRUE(is_owner(in(ServerState::kOwns), in(ServerState::kStandby)));
}

TEST(PairPlan, EachStateOfAServerIsKnown) {
  for (const char* word : {"starting", "awake", "falling asleep", "asleep", "waking", "failed", "ending", "standby",
                           "taking over", "handing over"})
    EXPECT_TRUE(server_state_of(word)) << word;
  EXPECT_FALSE(server_state_of("awak"));
}

}  // namespace
}  // namespace torpor::cli
