// SPDX-License-Identifier: Apache-2.0
// Runs lives of engines with sessions: some, and with TORPOR_PROOF=long 100,000. Planted mistakes are found early.
#include "tests/simulation/session_lives.h"

#include <cstdlib>

#include <fmt/core.h>
#include <gmock/gmock.h>

#include "base/log.h"
#include "tests/support/long_run.h"

namespace torpor::test {
namespace {

constexpr uint64_t kLives = TORPOR_SIMULATION_SEEDS < 100 ? 40 : 500;  // few with a sanitizer

// The life whose calls are printed: TORPOR_PRINT_LIFE=460.
uint64_t printed_life() {
  const char* const wanted = std::getenv("TORPOR_PRINT_LIFE");
  return wanted == nullptr ? ~uint64_t{0} : std::strtoull(wanted, nullptr, 10);
}

TEST(SessionLives, EachRequestHasOneOwnerWhereverEnginesAreKilled) {
  log().set_level(LogLevel::kOff);
  const uint64_t lives = long_run() ? 100'000 : kLives;
  SessionSteps steps;
  SessionResult sum;
  for (uint64_t seed = 0; seed < lives; ++seed) {
    const SessionResult result = simulate_sessions(seed, steps, Planted::kNone, seed == printed_life());
    ASSERT_FALSE(result.failure) << "life " << seed << ": " << *result.failure;
    sum.add(result);
  }
  fmt::print(
      "proof: {} lives of engines with sessions: {} calls, {} kills, {} failing steps, {} requests and {} children, of "
      "which {} ended with their engine; {} tokens as expected; images came back {} times, to another engine {} times, "
      "{} times too late, {} were damaged; {} leftovers removed; 0 lost, 0 with two owners\n",
      lives, sum.calls, sum.kills, sum.failed, sum.requests, sum.forked, sum.lost, sum.tokens, sum.resumed, sum.taken,
      sum.too_late, sum.damaged, sum.swept);
  for (size_t i = 0; i < kSessionVerbs; ++i) {
    const auto verb = static_cast<SessionVerb>(i);
    fmt::print("proof: sessions, {}: at most {} steps, killed at {} of them\n", name(verb), steps.most(verb),
               steps.killed(verb));
    if (long_run()) {
      EXPECT_THAT(steps.missed(verb), ::testing::IsEmpty()) << name(verb);
    }
  }
  if (lives < 400) return;
  // Everything that this test is about did happen.
  EXPECT_GT(sum.kills, lives / 2);
  EXPECT_GT(sum.resumed, lives / 2);
  EXPECT_GT(sum.taken, lives / 10);
  for (const uint64_t count : {sum.failed, sum.lost, sum.too_late, sum.forked, sum.damaged, sum.swept})
    EXPECT_GT(count, lives / 50);
  for (const SessionVerb verb : {SessionVerb::kHibernate, SessionVerb::kResume, SessionVerb::kOpen, SessionVerb::kTake,
                                 SessionVerb::kMoveFrom, SessionVerb::kMoveTo, SessionVerb::kDelete})
    EXPECT_GT(steps.killed(verb), steps.most(verb) / 5) << name(verb);
}

constexpr const char* kMistakes[] = {"None", "NoEpochCheck", "FreeBeforeVerify", "AdmitTwice"};

class PlantedInSessions : public ::testing::TestWithParam<Planted> {};
INSTANTIATE_TEST_SUITE_P(Mistakes, PlantedInSessions,
                         ::testing::Values(Planted::kNoEpochCheck, Planted::kFreeBeforeVerify, Planted::kAdmitTwice),
                         [](const auto& info) { return kMistakes[static_cast<size_t>(info.param)]; });

TEST_P(PlantedInSessions, AreFoundWithinAThousandLives) {
  log().set_level(LogLevel::kOff);
  SessionSteps steps;
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    if (const SessionResult result = simulate_sessions(seed, steps, GetParam()); result.failure) {
      fmt::print("proof: sessions with the mistake {}: found in life {}: {}\n",
                 kMistakes[static_cast<size_t>(GetParam())], seed, *result.failure);
      return;
    }
  }
  FAIL() << "nobody sees it in 1,000 lives";
}

}  // namespace
}  // namespace torpor::test
