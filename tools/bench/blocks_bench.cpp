// SPDX-License-Identifier: Apache-2.0
// Bookkeeping of a rank for each KV block of a sleep to host memory: blocks so small that their bytes cost next to
// nothing. In microseconds a block: planning, a sleep that copies all blocks, one that finds all of them unchanged, and
// the wake, orders encoded and decoded as between processes. Then the same of a pool in which few blocks are live,
// beside a pool of only those.
//
// Baseline: a map from block to a copy of its bytes, filled and written back. Ceiling: one copy of all bytes, there and
// back. Median of the rounds, interleaved, after one that only warms.
#include <cstring>
#include <iostream>
#include <unordered_map>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "tools/bench/bench.h"
#include "tools/bench/kv_rank.h"

namespace {

using namespace torpor;
using bench::KvRank;
using bench::median;
using bench::must;
using bench::seconds;

constexpr uint64_t kBlockBytes = 64;

// The seconds of each round, by stage.
using Times = std::map<std::string, std::vector<double>>;

void sleep_and_wake(KvRank& pool, bool counts, Times& times) {
  const auto take = [&](const char* stage, const std::function<void()>& work) {
    const double taken = seconds(work);
    if (counts) times[stage].push_back(taken);
  };
  pool.change(1);
  take("plan", [&] { pool.plan(); });
  uint64_t copied = 0;
  take("save", [&] { copied = pool.save(); });
  if (copied != pool.live().size() * kBlockBytes) must(Error{.code = Code::kInternal, .what = "not all was copied"});
  pool.release();
  take("restore", [&] { pool.restore(); });
  take("save_unchanged", [&] { copied = pool.save(); });
  if (copied != 0) must(Error{.code = Code::kInternal, .what = "an unchanged block was copied"});
  pool.release();
  pool.restore();
}

void copy_by_map(const KvRank& pool, bool counts, Times& times) {
  std::unordered_map<int32_t, std::vector<std::byte>> kept;
  const auto at = [&](int32_t block) {
    return pool.content().subspan(static_cast<size_t>(block) * kBlockBytes, kBlockBytes);
  };
  const double taken = seconds([&] {
    for (const int32_t block : pool.live())
      kept.emplace(block, std::vector<std::byte>(at(block).begin(), at(block).end()));
    for (const int32_t block : pool.live()) std::memcpy(at(block).data(), kept.at(block).data(), kBlockBytes);
  });
  if (counts) times["map"].push_back(taken);
}

void copy_at_once(const KvRank& pool, std::vector<std::byte>& room, bool counts, Times& times) {
  const size_t bytes = pool.live().size() * kBlockBytes;
  const double taken = seconds([&] {
    std::memcpy(room.data(), pool.content().data(), bytes);
    std::memcpy(pool.content().data(), room.data(), bytes);
  });
  if (counts) times["copy"].push_back(taken);
}

// Microseconds for each of so many blocks.
nlohmann::ordered_json a_block(const Times& times, uint32_t blocks) {
  nlohmann::ordered_json rows;
  for (const auto& [stage, taken] : times) rows[stage] = 1e6 * median(taken) / blocks;
  return rows;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Bookkeeping of a rank for each KV block of a sleep and a wake."};
  uint32_t blocks = 200'000;
  uint32_t live = 10'000;
  int rounds = 5;
  bool as_json = false;
  app.add_option("--blocks", blocks, "of the pool")->capture_default_str()->check(CLI::Range(1'000, 4'000'000));
  app.add_option("--live", live, "of them, in the sparse pool")
      ->capture_default_str()
      ->check(CLI::Range(100, 1'000'000));
  app.add_option("--rounds", rounds, "measured rounds")->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_flag("--json", as_json, "print one JSON object");
  CLI11_PARSE(app, argc, argv);
  live = std::min(live, blocks);

  Times full;
  Times sparse;
  Times small;
  {
    KvRank all(blocks, kBlockBytes, blocks);
    KvRank few(blocks, kBlockBytes, live);
    KvRank only(live, kBlockBytes, live);
    std::vector<std::byte> room(blocks * kBlockBytes, std::byte{1});
    for (int round = 0; round <= rounds; ++round) {
      sleep_and_wake(all, round > 0, full);
      copy_by_map(all, round > 0, full);
      copy_at_once(all, room, round > 0, full);
      sleep_and_wake(few, round > 0, sparse);
      sleep_and_wake(only, round > 0, small);
    }
  }
  const nlohmann::ordered_json of_all = a_block(full, blocks);
  const nlohmann::ordered_json of_few = a_block(sparse, live);
  const nlohmann::ordered_json of_only = a_block(small, live);
  const auto sum = [](const nlohmann::ordered_json& rows) {
    return rows["plan"].get<double>() + rows["save_unchanged"].get<double>() + rows["restore"].get<double>();
  };
  const nlohmann::ordered_json json = {{"blocks", blocks},
                                       {"live", live},
                                       {"rounds", rounds},
                                       {"unit", "us a live block, median"},
                                       {"all_live", of_all},
                                       {"few_live", of_few},
                                       {"pool_of_the_few", of_only},
                                       {"bookkeeping_us", sum(of_all)},
                                       {"few_beside_pool_of_the_few", sum(of_few) / sum(of_only)}};
  if (as_json) {
    std::cout << json.dump(2) << '\n';
    return 0;
  }
  fmt::print("{:<34}{:>8}{:>8}{:>11}{:>9} |{:>8}{:>8}\n", "us a live block", "plan", "save", "unchanged", "restore",
             "(map)", "(copy)");
  const auto row = [](const std::string& title, const nlohmann::ordered_json& rows) {
    const auto value = [&](const char* name) { return rows.contains(name) ? rows[name].get<double>() : 0.0; };
    fmt::print("{:<34}{:>8.3f}{:>8.3f}{:>11.3f}{:>9.3f} |{:>8.3f}{:>8.3f}\n", title, value("plan"), value("save"),
               value("save_unchanged"), value("restore"), value("map"), value("copy"));
  };
  row(fmt::format("{} blocks, all live", blocks), of_all);
  row(fmt::format("{} blocks, {} live", blocks, live), of_few);
  row(fmt::format("{} blocks, all live", live), of_only);
  fmt::print("plan + unchanged + restore: {:.2f} us a block; few live beside a pool of only those: {:.2f}\n",
             sum(of_all), sum(of_few) / sum(of_only));
  fmt::print("map: copied into a map and back; copy: all bytes at once, there and back; median of {} rounds\n", rounds);
  return 0;
}
