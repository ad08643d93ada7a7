// simulate: runs simulation seeds. Exit code 0: all passed; 1: some failed, their numbers are printed.
#include <chrono>
#include <iostream>

#include <boost/filesystem.hpp>
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "base/log.h"
#include "tests/simulation/simulation.h"
#include "tests/support/temporary_directory.h"

int main(int argc, char** argv) {
  using namespace torpor;
  CLI::App app{"Simulates engines that sleep, wake, offload and fail, one seed each, against twins to which nothing happens."};
  uint64_t seeds = 1000;
  uint64_t first = 0;
  bool tell = false;
  app.add_option("--seeds", seeds, "how many")->capture_default_str();
  app.add_option("--first", first, "the first one")->capture_default_str();
  app.add_flag("--tell", tell, "print what happens");
  CLI11_PARSE(app, argc, argv);
  if (!tell) log().set_level(spdlog::level::off);

  const auto began = std::chrono::steady_clock::now();
  const test::TemporaryDirectory temporary;
  test::SimulationResult sum;
  uint64_t failed = 0;
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    const std::string directory = fmt::format("{}/{}", temporary.path(), seed);
    boost::filesystem::create_directory(directory);
    const test::SimulationResult result = test::simulate(seed, directory, tell);
    boost::filesystem::remove_all(directory);
    if (result.failure) {
      ++failed;
      fmt::print("seed {} failed: {}\n  again: simulate --first {} --seeds 1 --tell\n", seed, *result.failure, seed);
    }
    sum.tokens += result.tokens;
    sum.sleeps += result.sleeps;
    sum.new_engines += result.new_engines;
    sum.refused += result.refused;
    sum.lost += result.lost;
    sum.onboarded += result.onboarded;
    sum.offloaded += result.offloaded;
    sum.preemptions += result.preemptions;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  fmt::print("{} seeds, {} failed, {:.1f} s: {} tokens compared over {} sleeps ({} woken by a new engine), {} failed and undone, {} engines lost to faults,\n{} blocks offloaded, {} tokens onboarded, {} preemptions\n",
             seeds, failed, seconds, sum.tokens, sum.sleeps, sum.new_engines, sum.refused, sum.lost, sum.offloaded, sum.onboarded, sum.preemptions);
  return failed == 0 ? 0 : 1;
}
