// SPDX-License-Identifier: Apache-2.0
// The index of blocks when every slot is taken by another key: bytes a slot, and the time of a probe (in chains of 32
// keys, one by one, and of keys that are not there), of a backing, and of storing a block where another one has to go.
//
// CPU time. Baseline: std::unordered_map with the same keys. Ceiling of a probe: as many reads of as much memory in the
// same random order, asked for as far ahead, without looking for anything. Interleaved, median of the rounds after one
// that only warms.
#include <time.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <random>
#include <span>
#include <thread>
#include <unordered_map>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "kvcache/block_index.h"
#include "tools/bench/bench.h"

using namespace torpor;
using namespace torpor::bench;

namespace {

constexpr size_t kChain = 32;

BlockKey key_of(uint64_t number) {
  BlockKey key;
  for (size_t word = 0; word < 4; ++word) {  // splitmix64
    uint64_t x = (number * 4 + word + 1) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    x ^= x >> 31;
    std::memcpy(key.hash.data() + word * 8, &x, sizeof x);
  }
  return key;
}

struct KeyHash {
  size_t operator()(const BlockKey& key) const {
    uint64_t value = 0;
    std::memcpy(&value, key.hash.data(), sizeof value);
    return value ^ key.group ^ (uint64_t{key.space} << 32);
  }
};
using Baseline = std::unordered_map<BlockKey, BlockLocations, KeyHash>;

// Of this thread: nothing here waits, and what else runs on the machine is left out as far as that goes.
double cpu_seconds(const std::function<void()>& work) {
  const auto now = [] {
    timespec time{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  };
  const double began = now();
  work();
  return now() - began;
}

double resident() {
  std::ifstream file("/proc/self/statm");
  uint64_t pages = 0;
  file >> pages >> pages;
  return static_cast<double>(pages) * static_cast<double>(::sysconf(_SC_PAGESIZE));
}

Slot store(BlockIndex& index, const BlockKey& key) {
  const Slot slot = must(index.reserve(StoreId::kHost, &key));
  index.commit(StoreId::kHost, slot);
  index.unpin(StoreId::kHost, slot);
  return slot;
}

// What a probe reads, and nothing else: a cell, and a while later an entry.
struct Reads {
  struct Entry {
    uint64_t words[6];
  };
  FlatArray<uint64_t> cells;
  FlatArray<Entry> entries;
  explicit Reads(size_t slots)
      : cells(must(FlatArray<uint64_t>::create(slots + slots / 2))), entries(must(FlatArray<Entry>::create(slots))) {
    for (size_t i = 0; i < cells.size(); ++i) cells[static_cast<int64_t>(i)] = i;
    for (size_t i = 0; i < slots; ++i) entries[static_cast<int64_t>(i)].words[0] = i;
  }
  uint64_t all(const std::vector<uint32_t>& order) const {
    uint64_t sum = 0;
    const auto cell = [&](size_t at) { return int64_t{order[at]} + order[at] / 2; };
    for (size_t at = 0; at < order.size(); ++at) {
      if (at + 16 < order.size()) __builtin_prefetch(&cells[cell(at + 16)]);
      if (at + 8 < order.size()) __builtin_prefetch(&entries[order[at + 8]]);
      const Entry& entry = entries[order[at]];
      sum += cells[cell(at)] + entry.words[0] + entry.words[4] + entry.words[5];
    }
    return sum;
  }
};

nlohmann::ordered_json measure(size_t slots, int rounds) {
  const double before = resident();
  const auto index = must(BlockIndex::create({.host_slots = static_cast<int32_t>(slots), .device_blocks = 1 << 16}));
  for (size_t i = 0; i < slots; ++i) store(*index, key_of(i));
  const double with_index = resident();
  Baseline baseline;
  baseline.reserve(slots);
  for (size_t i = 0; i < slots; ++i) baseline.emplace(key_of(i), BlockLocations{.host = static_cast<Slot>(i)});
  const double with_baseline = resident();
  const Reads reads(slots);

  const size_t probes = 1 << 18;
  std::mt19937_64 random(1);
  std::vector<uint32_t> order(probes);
  for (uint32_t& each : order) each = static_cast<uint32_t>(random() % slots);
  std::vector<BlockKey> keys;
  std::vector<BlockKey> absent;
  for (const uint32_t number : order) keys.push_back(key_of(number));
  for (size_t i = 0; i < probes; ++i) absent.push_back(key_of((uint64_t{1} << 40) + random() % (uint64_t{1} << 30)));
  std::array<BlockLocations, kChain> places;

  std::map<std::string, std::vector<double>> times;
  uint64_t next = uint64_t{1} << 50;
  uint64_t sum = 0;
  for (int round = 0; round <= rounds; ++round) {
    const auto time = [&](const char* name, size_t count, const std::function<void()>& work) {
      const double taken = cpu_seconds(work);
      if (round > 0) times[name].push_back(1e9 * taken / static_cast<double>(count));
    };
    // Stored first, so that what follows is found in an index that has been in use; the keys come back behind it.
    size_t found = 0;
    time("probe", probes, [&] {
      for (size_t at = 0; at < probes; at += kChain) found += index->run(std::span(keys).subspan(at, kChain), places);
    });
    if (found != probes) std::exit(2);
    time("baseline", probes, [&] {
      for (const BlockKey& key : keys) {
        const auto entry = baseline.find(key);
        if (entry == baseline.end()) std::exit(2);
        sum += static_cast<uint64_t>(entry->second.host);
      }
    });
    time("ceiling", probes, [&] { sum += reads.all(order); });
    time("alone", probes, [&] {
      for (const BlockKey& key : keys) sum += index->run({&key, 1}, places);
    });
    time("absent", probes, [&] {
      for (const BlockKey& key : absent) sum += index->run({&key, 1}, places);
    });
    time("baseline absent", probes, [&] {
      for (const BlockKey& key : absent) sum += baseline.count(key);
    });
    time("backing", probes, [&] {
      for (const uint32_t number : order) {
        const auto block = static_cast<int32_t>(number % (1 << 16));
        sum += static_cast<uint64_t>(index->backing(block, ContentVersion{1}).host + 2);
      }
    });
    // As many new keys as a step's, each in the place of the oldest; taken back at the end.
    const size_t stores = std::min<size_t>(slots / 4, 1 << 16);
    std::vector<BlockKey> fresh;
    for (size_t i = 0; i < stores; ++i) fresh.push_back(key_of(next++));
    time("store", stores, [&] {
      for (const BlockKey& key : fresh) store(*index, key);
    });
    (void)index->reports().take_dropped();
    for (const BlockKey& key : keys) {  // all of them are there again
      if (index->run({&key, 1}, places) == 0) store(*index, key);
    }
    for (const BlockKey& key : keys) {  // and were used last
      if (index->run({&key, 1}, places) == 0) continue;
      index->pin(StoreId::kHost, places[0].host);
      index->unpin(StoreId::kHost, places[0].host);
    }
    for (const BlockKey& key : keys) {
      if (index->run({&key, 1}, places) == 0) store(*index, key);
    }
    (void)index->reports().take_dropped();
  }
  if (sum == 42) fmt::print("\n");  // so that nothing is left out
  const auto ns = [&](const char* name) { return median(times[name]); };
  const auto count = static_cast<double>(slots);
  return {{"slots", slots},
          {"bytes_a_slot", (with_index - before) / count},
          {"baseline_bytes_a_slot", (with_baseline - with_index) / count},
          {"probe_ns", ns("probe")},
          {"baseline_probe_ns", ns("baseline")},
          {"ceiling_probe_ns", ns("ceiling")},
          {"times_baseline", ns("baseline") / ns("probe")},
          {"of_ceiling", ns("ceiling") / ns("probe")},
          {"alone_ns", ns("alone")},
          {"absent_ns", ns("absent")},
          {"baseline_absent_ns", ns("baseline absent")},
          {"backing_ns", ns("backing")},
          {"store_ns", ns("store")}};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Bytes a slot and time a probe of the index of blocks, every slot taken."};
  std::vector<size_t> sizes = {10'000, 100'000, 1'000'000, 10'000'000};
  int rounds = 7;
  bool as_json = false;
  app.add_option("--slots", sizes, "how many, each time")->capture_default_str()->check(CLI::Range(1000, 100'000'000));
  app.add_option("--rounds", rounds, "measured rounds")->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_flag("--json", as_json, "print one JSON object");
  CLI11_PARSE(app, argc, argv);
  nlohmann::ordered_json json = {{"rounds", rounds}, {"unit", "ns, median"}, {"sizes", nlohmann::json::array()}};
  for (const size_t slots : sizes) json["sizes"].push_back(measure(slots, rounds));
  if (as_json) {
    std::cout << json.dump(2) << '\n';
    return 0;
  }
  fmt::print("{:>10}{:>8}{:>8} |{:>7}{:>9}{:>9}{:>8}{:>9} |{:>7}{:>8}{:>10}{:>9}{:>7}\n", "slots", "bytes", "(map)",
             "probe", "(map)", "ceiling", "x map", "of ceil.", "alone", "absent", "(map)", "backing", "store");
  for (const auto& row : json["sizes"]) {
    const auto value = [&](const char* name) { return row[name].get<double>(); };
    fmt::print(
        "{:>10}{:>8.0f}{:>8.0f} |{:>7.0f}{:>9.0f}{:>9.0f}{:>8.1f}{:>8.0f}% "
        "|{:>7.0f}{:>8.0f}{:>10.0f}{:>9.0f}{:>7.0f}\n",
        row["slots"].get<size_t>(), value("bytes_a_slot"), value("baseline_bytes_a_slot"), value("probe_ns"),
        value("baseline_probe_ns"), value("ceiling_probe_ns"), value("times_baseline"), 100 * value("of_ceiling"),
        value("alone_ns"), value("absent_ns"), value("baseline_absent_ns"), value("backing_ns"), value("store_ns"));
  }
  fmt::print("bytes a slot and ns; probe: in chains of {} keys; map: std::unordered_map; median of {} rounds\n", kChain,
             rounds);
  return 0;
}
