// SPDX-License-Identifier: Apache-2.0
// Runs simulations of servers that wake elsewhere: a few seeds; with TORPOR_PROOF=long more than 100,000 requests.
#include "tests/simulation/elsewhere.h"

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <boost/filesystem.hpp>

#include "base/log.h"
#include "tests/support/long_run.h"
#include "tests/support/temporary_directory.h"

namespace torpor::test {
namespace {

constexpr int kRequests = 1000;  // in each seed
constexpr int kCycles = 10;
constexpr uint64_t kSeeds = TORPOR_SIMULATION_SEEDS < 100 ? 1 : 3;  // few with a sanitizer

TEST(Elsewhere, EveryRequestIsAnsweredOnceWhateverBecomesOfTheServers) {
  log().set_level(LogLevel::kOff);
  const uint64_t seeds = long_run() ? 105 : kSeeds;
  const TemporaryDirectory temporary(in_memory());
  ElsewhereResult sum;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    const std::string directory = fmt::format("{}/{}", temporary.path(), seed);
    const ElsewhereResult result = simulate_elsewhere(seed, kRequests, kCycles, directory);
    ASSERT_FALSE(result.failure) << "seed " << seed << ", cycle " << result.cycles << ": " << *result.failure;
    boost::filesystem::remove_all(directory);
    sum.add(result);
  }
  EXPECT_EQ(sum.requests, kRequests * static_cast<int>(seeds));
  EXPECT_EQ(sum.cycles, kCycles * static_cast<int>(seeds));
  fmt::print(
      "proof: servers that go on elsewhere: {} requests, each answered once, {} tokens identical, over {} cycles "
      "({} drained, {} killed, {} killed and {} paused in a push, {} cut off, {} started again); {} pushes, {} that "
      "failed, {} too late; {} requests sent again, {} extended, {} begun again; {} calls took effect late; {} objects "
      "removed meanwhile, {} removals kept out\n",
      sum.requests, sum.tokens, sum.cycles, sum.fates[0], sum.fates[1], sum.fates[2], sum.fates[3], sum.fates[4],
      sum.fates[5], sum.pushes, sum.failed, sum.too_late, sum.sent_again, sum.extended, sum.begun_again, sum.late_calls,
      sum.removed, sum.kept_out);
  if (seeds < 3) return;
  // Everything that this test is about did happen.
  EXPECT_GT(sum.pushes, 0);
  EXPECT_GT(sum.failed, 0);
  EXPECT_GT(sum.sent_again, 0);
  EXPECT_GT(sum.extended, 0);
  EXPECT_GT(sum.begun_again, 0);
  EXPECT_GT(sum.too_late, 0);
  EXPECT_GT(sum.late_calls, 0);
  EXPECT_GT(sum.removed, 0);
}

}  // namespace
}  // namespace torpor::test
