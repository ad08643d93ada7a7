// SPDX-License-Identifier: Apache-2.0
// Time of an allocation of host memory, and of giving it back, with many free ranges that lie scattered over one slab
// or many. Baseline: the smallest range that fits, looked for among all of them, as the arena did it before. Ceiling:
// taking the arena's lock, and no more.
//
// Median of the rounds, after one that only warms; who allocates does nothing else meanwhile.
#include <algorithm>
#include <iostream>
#include <random>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "allocator/host_arena.h"
#include "base/mutex.h"
#include "tools/bench/bench.h"

namespace {

using namespace torpor;
using bench::median;
using bench::must;
using bench::seconds;

// Free ranges of slabs by offset; numbers only.
class Scanned {
 public:
  Scanned(size_t ranges, size_t slabs) : slabs_(slabs) {
    for (size_t i = 0; i < ranges; ++i) slabs_[i % slabs].emplace(i / slabs * 2 * kPage, kPage);
  }
  struct Taken {
    size_t slab = 0;
    uint64_t offset = 0;
  };
  Taken take(uint64_t bytes) {
    const MutexLock lock(mutex_);
    Taken best;
    uint64_t least = UINT64_MAX;
    for (size_t slab = 0; slab < slabs_.size(); ++slab) {
      for (const auto& [offset, length] : slabs_[slab]) {
        if (length < bytes || length >= least) continue;
        best = {slab, offset};
        least = length;
      }
    }
    slabs_[best.slab].erase(best.offset);
    return best;
  }
  void give_back(const Taken& taken) {
    const MutexLock lock(mutex_);
    slabs_[taken.slab].emplace(taken.offset, kPage);
  }

 private:
  Mutex mutex_;
  std::vector<std::map<uint64_t, uint64_t>> slabs_;
};

nlohmann::ordered_json measure(size_t ranges, size_t slabs, size_t calls, size_t baseline_calls, int rounds) {
  // Twice as many spans as ranges; every second one goes again, in any order.
  const uint64_t bytes = 2 * ranges * kPage;
  const auto arena = must(HostArena::create({.slab_bytes = align_up(bytes / slabs, kPage)}));
  must(arena->prefault(slabs == 1 ? bytes : 1));
  std::vector<HostArena::Span> spans;
  for (size_t i = 0; i < 2 * ranges; ++i) spans.push_back(must(arena->allocate(kPage)));
  std::mt19937_64 random(1);
  std::vector<size_t> order;
  for (size_t i = 0; i < spans.size(); i += 2) order.push_back(i);
  std::shuffle(order.begin(), order.end(), random);
  for (const size_t i : order) spans[i] = {};
  Scanned scanned(ranges, slabs);
  Mutex lock;

  std::vector<double> take_ns;
  std::vector<double> give_ns;
  std::vector<double> baseline_ns;
  std::vector<double> ceiling_ns;
  for (int round = 0; round <= rounds; ++round) {
    const auto keep = [&](std::vector<double>& times, double taken, size_t count) {
      if (round > 0) times.push_back(1e9 * taken / static_cast<double>(count));
    };
    std::vector<HostArena::Span> taken(calls);
    keep(take_ns, seconds([&] {
           for (HostArena::Span& span : taken) span = must(arena->allocate(kPage));
         }),
         calls);
    std::shuffle(taken.begin(), taken.end(), random);
    keep(give_ns, seconds([&] {
           for (HostArena::Span& span : taken) HostArena::Span(std::move(span));
         }),
         calls);
    std::vector<Scanned::Taken> scans(baseline_calls);
    keep(baseline_ns, seconds([&] {
           for (Scanned::Taken& scan : scans) scan = scanned.take(kPage);
         }),
         baseline_calls);
    for (const Scanned::Taken& scan : scans) scanned.give_back(scan);
    keep(ceiling_ns, seconds([&] {
           for (size_t i = 0; i < calls; ++i) const MutexLock held(lock);
         }),
         calls);
  }
  const HostArenaInfo info = arena->info();
  return {{"free_ranges", ranges},
          {"slabs", info.held_bytes / align_up(bytes / slabs, kPage)},
          {"allocate_ns", median(take_ns)},
          {"give_back_ns", median(give_ns)},
          {"baseline_allocate_ns", median(baseline_ns)},
          {"times_baseline", median(baseline_ns) / median(take_ns)},
          {"ceiling_lock_ns", median(ceiling_ns)}};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Time of an allocation of host memory with many free ranges."};
  std::vector<size_t> ranges = {1'000, 100'000};
  size_t calls = 1'000;
  size_t baseline_calls = 20;
  int rounds = 15;
  bool as_json = false;
  app.add_option("--ranges", ranges, "how many are free, each time")
      ->capture_default_str()
      ->check(CLI::Range(1000, 1'000'000));
  app.add_option("--calls", calls, "allocations a round")->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_option("--baseline-calls", baseline_calls, "of the baseline")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000));
  app.add_option("--rounds", rounds, "measured rounds")->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_flag("--json", as_json, "print one JSON object");
  CLI11_PARSE(app, argc, argv);
  nlohmann::ordered_json json = {{"rounds", rounds}, {"unit", "ns, median"}, {"sizes", nlohmann::json::array()}};
  for (const size_t count : ranges) {
    for (const size_t slabs : {size_t{1}, count / 25})
      json["sizes"].push_back(measure(count, slabs, calls, baseline_calls, rounds));
  }
  if (as_json) {
    std::cout << json.dump(2) << '\n';
    return 0;
  }
  fmt::print("{:>12}{:>8} |{:>9}{:>11}{:>9} |{:>10}{:>8}\n", "free ranges", "slabs", "allocate", "(scanning)",
             "x scan.", "give back", "(lock)");
  for (const auto& row : json["sizes"]) {
    const auto value = [&](const char* name) { return row[name].get<double>(); };
    fmt::print("{:>12}{:>8} |{:>9.0f}{:>11.0f}{:>9.0f} |{:>10.0f}{:>8.0f}\n", row["free_ranges"].get<size_t>(),
               row["slabs"].get<size_t>(), value("allocate_ns"), value("baseline_allocate_ns"), value("times_baseline"),
               value("give_back_ns"), value("ceiling_lock_ns"));
  }
  fmt::print("ns; scanning: the smallest range that fits, of all; lock: taken and given back; median of {} rounds\n",
             rounds);
  return 0;
}
