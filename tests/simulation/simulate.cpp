// SPDX-License-Identifier: Apache-2.0
// simulate: runs seeds of the simulation. Exit code 0: all passed; 1: some failed, and their numbers are printed; 2:
// bad arguments.
#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include <fmt/core.h>
#include <CLI/CLI.hpp>
#include <boost/filesystem.hpp>

#include "base/log.h"
#include "console/event_export.h"
#include "console/replay.h"
#include "tests/simulation/simulation.h"
#include "tests/support/temporary_directory.h"

namespace {

using namespace torpor;

std::string shown(const console::SourceEvents& recorded, const console::ReplayDifference& difference) {
  Result<console::EventExport> writer = console::EventExport::create({});
  console::EventTexts texts;
  for (size_t i = 0; i < std::min(difference.at, recorded.events.size()); ++i) (void)texts.add(recorded.events[i]);
  const auto one = [&](const std::optional<Event>& event) {
    if (!event) return std::string("nothing");
    nlohmann::ordered_json words = writer->to_json(recorded.source, texts, *event);
    if (event->type == EventType::kText) {
      console::EventTexts one_part;
      Event part = *event;
      part.to = 0;
      part.from |= kLastPart;
      if (const std::optional<console::EventText> text = one_part.add(part)) words["part"] = text->words;
    }
    return words.dump();
  };
  return fmt::format("event {} replays otherwise: it was {}, it is {}", difference.at, one(difference.recorded),
                     one(difference.replayed));
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{
      "Simulates engines that sleep, wake, offload and fail, one seed each, against reference runs in which nothing "
      "happens."};
  uint64_t seeds = 1000;
  uint64_t first = 0;
  bool verbose = false;
  app.add_option("--seeds", seeds, "how many")->capture_default_str();
  app.add_option("--first", first, "the first one")->capture_default_str();
  unsigned jobs = std::max(1u, std::thread::hardware_concurrency());
  app.add_option("--jobs", jobs, "how many at the same time")->capture_default_str()->check(CLI::Range(1, 1024));
  app.add_flag("--verbose", verbose, "print what happens, one seed after the other");
  bool replay = false;
  app.add_flag("--replay", replay, "record each seed without threads of its own, and replay the recording");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& problem) {
    return app.exit(problem) == 0 ? 0 : 2;
  }
  if (verbose) jobs = 1;
  if (!verbose) log().set_level(LogLevel::kOff);

  const auto began = std::chrono::steady_clock::now();
  const test::TemporaryDirectory temporary(test::in_memory());
  std::mutex mutex;  // guards all below
  test::SimulationResult sum;
  uint64_t failed = 0;
  uint64_t next = first;
  uint64_t events = 0;
  const auto work = [&] {
    std::unique_lock lock(mutex);
    while (next < first + seeds) {
      const uint64_t seed = next++;
      lock.unlock();
      const std::string directory = fmt::format("{}/{}", temporary.path(), seed);
      const auto emptied = [&] {
        boost::filesystem::remove_all(directory);
        boost::filesystem::create_directory(directory);
        boost::filesystem::permissions(directory, boost::filesystem::owner_all);  // whatever the umask
      };
      emptied();
      console::SourceEvents recorded;
      test::SimulationResult result = test::simulate(seed, directory, verbose, replay ? &recorded : nullptr);
      uint64_t replayed = 0;
      if (replay && !result.failure) {
        emptied();
        const auto again = test::replay_simulation(seed, recorded, directory);
        if (!again) result.failure = again.error().to_string();
        if (again && again->difference) result.failure = shown(recorded, *again->difference);
        if (again) replayed = again->events;
      }
      boost::filesystem::remove_all(directory);
      lock.lock();
      sum.add(result);
      events += replayed;
      if (!result.failure) continue;
      ++failed;
      fmt::print("seed {} failed: {}\n  again: tools/dev simulate --first {} --seeds 1 --verbose\n", seed,
                 *result.failure, seed);
    }
  };
  std::vector<std::thread> threads;
  for (unsigned job = 1; job < jobs; ++job) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  fmt::print(
      "{} seeds, {} failed, {:.1f} s: {} tokens compared over {} sleeps ({} woken by a new engine) and {} checkpoints "
      "while serving ({} gone on from), {} failed and undone, {} engines lost to faults,\n{} blocks offloaded, {} "
      "tokens onboarded, {} preemptions\n"
      "{} post-copy wakes: {} steps gave tokens before {} blocks had arrived; {} were lost\n",
      seeds, failed, seconds, sum.tokens, sum.sleeps, sum.new_engines, sum.checkpoints, sum.rewound, sum.refused,
      sum.lost, sum.offloaded, sum.onboarded, sum.preemptions, sum.early, sum.early_steps, sum.late, sum.deferred_lost);
  if (replay) fmt::print("{} events replayed, each equal\n", events);
  return failed == 0 ? 0 : 1;
}
