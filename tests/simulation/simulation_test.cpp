// The seeds of the normal run. More: tools/dev simulate --seeds N.
#include "tests/simulation/simulation.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <boost/filesystem.hpp>

#include "base/log.h"
#include "tests/support/temporary_directory.h"

namespace torpor::test {
namespace {

constexpr uint64_t kSeeds = TORPOR_SIMULATION_SEEDS;
constexpr uint64_t kGroups = 10;  // tests that may run at the same time

class Simulation : public ::testing::TestWithParam<uint64_t> {};
INSTANTIATE_TEST_SUITE_P(Seeds, Simulation, ::testing::Range(uint64_t{0}, kGroups));

TEST_P(Simulation, I10EveryTokenIsThatOfARunToWhichNothingHappens) {
  log().set_level(spdlog::level::off);
  const TemporaryDirectory temporary(in_memory());
  SimulationResult sum;
  for (uint64_t seed = GetParam() * (kSeeds / kGroups); seed < (GetParam() + 1) * (kSeeds / kGroups); ++seed) {
    const std::string directory = fmt::format("{}/{}", temporary.path(), seed);
    boost::filesystem::create_directory(directory);
    boost::filesystem::permissions(directory, boost::filesystem::owner_all);  // whatever the umask
    const SimulationResult result = simulate(seed, directory);
    EXPECT_FALSE(result.failure) << "seed " << seed << ": " << *result.failure << "\nagain: tools/dev simulate --first "
                                 << seed << " --seeds 1 --tell";
    boost::filesystem::remove_all(directory);
    sum.add(result);
  }
  if (kSeeds / kGroups < 50) return;
  // What is to be tested did happen.
  EXPECT_GT(sum.sleeps, 0);
  EXPECT_GT(sum.reused, 0u);
  EXPECT_GT(sum.new_engines, 0);
  EXPECT_GT(sum.offloaded, 0);
  EXPECT_GT(sum.onboarded, 0);
  EXPECT_GT(sum.preemptions, 0);
}

TEST(SimulationReplay, ASeedReplaysExactly) {
  log().set_level(spdlog::level::off);
  for (const uint64_t seed : {11, 12, 13, 14, 15}) {
    std::vector<std::vector<int64_t>> runs;
    for (int run = 0; run < 2; ++run) {
      const TemporaryDirectory temporary(in_memory());
      const SimulationResult r = simulate(seed, temporary.path());
      runs.push_back({r.tokens, r.sleeps, r.new_engines, r.refused, r.lost, r.onboarded, r.offloaded, r.preemptions});
    }
    EXPECT_EQ(runs[0], runs[1]) << "seed " << seed;
  }
}

}  // namespace
}  // namespace torpor::test
