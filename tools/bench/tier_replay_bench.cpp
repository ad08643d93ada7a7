// SPDX-License-Identifier: Apache-2.0
// A trace of requests through block pools in three tiers (device, host, disk): which share of the prompts' blocks is
// found, where, and how that depends on the eviction policy. Beside it what no policy can beat: Belady's offline
// optimum for one cache of all three together.
//
// And through a BlockIndex below the same device: host memory by LRU, disk by whole segments, the oldest first, without
// and with appending again what was used; for one segment length after the other.
//
// Trace: JSON lines with "hash_ids", the prefix-chained ids of a request's blocks (Mooncake, FAST 2025). Without one,
// prompts drawn from a Zipf distribution over conversations that grow. No bytes move; blocks are the pools' own.
#include <array>
#include <cmath>
#include <fstream>
#include <iostream>
#include <random>
#include <set>
#include <unordered_map>

#include <fmt/ranges.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "kvcache/block_index.h"
#include "kvcache/block_pool.h"
#include "tools/bench/bench.h"

namespace {

using namespace torpor;
using bench::must;

using Trace = std::vector<std::vector<int32_t>>;  // block ids by request

Trace read_trace(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    fmt::print(stderr, "error: cannot read {}\n", path);
    std::exit(2);
  }
  Trace trace;
  for (std::string line; std::getline(file, line);) {
    const auto entry = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (entry.is_discarded() || !entry.contains("hash_ids")) {
      fmt::print(stderr, "error: {} line {} is not a JSON object with \"hash_ids\"\n", path, trace.size() + 1);
      std::exit(2);
    }
    trace.push_back(entry["hash_ids"].get<std::vector<int32_t>>());
  }
  return trace;
}

Trace made_trace() {
  std::mt19937 random(1);
  constexpr int kConversations = 2000;
  std::vector<double> weights;
  for (int i = 1; i <= kConversations; ++i) weights.push_back(1 / std::pow(i, 0.9));
  std::discrete_distribution<int> which(weights.begin(), weights.end());
  std::vector<std::vector<int32_t>> conversations(kConversations);
  Trace trace;
  int32_t next = 1;
  for (int i = 0; i < 8000; ++i) {
    auto& conversation = conversations[static_cast<size_t>(which(random))];
    for (int64_t more = 1 + static_cast<int64_t>(random() % 8); more > 0; --more) conversation.push_back(next++);
    if (conversation.size() > 100) conversation.resize(1);
    trace.push_back(conversation);
  }
  return trace;
}

std::vector<BlockIdentity> chain_of(const std::vector<int32_t>& ids) {
  std::vector<BlockIdentity> chain;
  Digest parent;
  for (const int32_t id : ids) {
    chain.push_back({.parent = parent, .tokens = {id}});
    parent = chain.back().hash();
  }
  return chain;
}

void put(BlockPool& pool, const BlockIdentity& identity) {
  if (pool.contains(identity)) return;
  Result<std::vector<MutableBlock>> block = pool.allocate(1);
  if (!block) return;
  must(begin_filling((*block)[0], identity));
  must((*block)[0].compute_done());
  (void)must((*block)[0].register_block());
}

struct Hits {
  uint64_t blocks = 0;
  std::vector<uint64_t> by_tier;
  double rate(size_t tier) const { return static_cast<double>(by_tier[tier]) / static_cast<double>(blocks); }
};

// Each request: the longest run that the tiers have together, in the order of the tiers for each block; then all its
// blocks are in the device, and go down from there.
Hits replay(const Trace& trace, const std::vector<int32_t>& sizes, EvictionPolicy policy) {
  std::vector<std::unique_ptr<BlockPool>> tiers;
  for (size_t tier = 0; tier < sizes.size(); ++tier) {
    // The device's pool is the engine's and evicts as engines do.
    tiers.push_back(must(BlockPool::create(
        {.num_blocks = sizes[tier], .block_tokens = 1, .eviction = tier == 0 ? EvictionPolicy::kLru : policy})));
  }
  Hits hits{.by_tier = std::vector<uint64_t>(tiers.size())};
  for (const std::vector<int32_t>& ids : trace) {
    const std::vector<BlockIdentity> chain = chain_of(ids);
    hits.blocks += chain.size();
    for (const BlockIdentity& identity : chain) {
      bool found = false;
      for (size_t tier = 0; tier < tiers.size() && !found; ++tier) {
        found = !tiers[tier]->match({&identity, 1}).empty();
        hits.by_tier[tier] += found ? 1 : 0;
      }
      if (!found) break;
    }
    for (const auto& pool : tiers) {
      for (auto identity = chain.rbegin(); identity != chain.rend();
           ++identity) {  // the end is evicted before the beginning
        put(*pool, *identity);
      }
    }
  }
  return hits;
}

// Host memory and disk as the index has them.
class IndexTiers {
 public:
  IndexTiers(int32_t host, int32_t disk, int32_t segment, bool again)
      : segment_(segment),
        again_(again),
        index_(must(BlockIndex::create(
            {.host_slots = host, .disk_segments = std::max(disk / segment, 2), .segment_slots = segment}))) {}
  // 1: host, 2: disk, 0: nowhere. What is found was used.
  int use(const BlockKey& key) {
    BlockLocations found;
    if (index_->run({&key, 1}, {&found, 1}) == 0) return 0;
    const StoreId store = found.host >= 0 ? StoreId::kHost : StoreId::kDisk;
    const Slot slot = found.host >= 0 ? found.host : found.disk;
    index_->pin(store, slot);
    index_->unpin(store, slot);
    return found.host >= 0 ? 1 : 2;
  }
  void put(const BlockKey& key) {
    BlockLocations found;
    (void)index_->run({&key, 1}, {&found, 1});
    if (found.host < 0) stored(StoreId::kHost, index_->reserve(StoreId::kHost, &key));
    if (found.disk >= 0) return;
    if (again_) reinsert_used();
    stored(StoreId::kDisk, index_->reserve(StoreId::kDisk, &key));
    (void)index_->reports().take_dropped();
  }
  double reinserted() const { return static_cast<double>(reinserted_) / static_cast<double>(written_); }

 private:
  void stored(StoreId store, Result<Slot> slot) {
    if (!slot) return;
    written_ += store == StoreId::kDisk ? 1 : 0;
    index_->commit(store, *slot);
    index_->unpin(store, *slot);
  }
  // Of the segment that goes next, as soon as the last free one has begun, and as far as there is room.
  void reinsert_used() {
    int64_t room = index_->disk_room();
    const bool begun = room > last_room_;  // another one went since
    last_room_ = room;
    if (!begun || room >= segment_) return;
    for (const LeavingBlock& block : index_->leaving()) {
      if (!block.used || block.on_host || --room < 1) continue;
      index_->pin(StoreId::kDisk, block.slot);
      stored(StoreId::kDisk, index_->reinsert(block.slot));
      --last_room_;
      index_->unpin(StoreId::kDisk, block.slot);
      ++reinserted_;
    }
  }
  const int32_t segment_;
  const bool again_;
  int64_t last_room_ = 0;
  uint64_t written_ = 0;
  uint64_t reinserted_ = 0;
  std::unique_ptr<BlockIndex> index_;
};

Hits replay_index(const Trace& trace, const std::vector<int32_t>& sizes, IndexTiers& tiers) {
  const auto device = must(BlockPool::create({.num_blocks = sizes[0], .block_tokens = 1}));
  Hits hits{.by_tier = std::vector<uint64_t>(3)};
  for (const std::vector<int32_t>& ids : trace) {
    const std::vector<BlockIdentity> chain = chain_of(ids);
    std::vector<BlockKey> keys(chain.size());
    hits.blocks += chain.size();
    bool found = true;
    for (size_t i = 0; i < chain.size(); ++i) {
      const Digest hash = chain[i].hash();
      std::copy(hash.bytes.begin(), hash.bytes.end(), keys[i].hash.begin());
      if (!found) continue;
      const int below = device->match({&chain[i], 1}).empty() ? tiers.use(keys[i]) : -1;
      found = below != 0;
      if (found) ++hits.by_tier[below < 0 ? 0 : static_cast<size_t>(below)];
    }
    for (size_t i = chain.size(); i-- > 0;) put(*device, chain[i]);
    for (size_t i = chain.size(); i-- > 0;) tiers.put(keys[i]);
  }
  return hits;
}

// Belady, "A study of replacement algorithms for a virtual-storage computer", 1966: evict what is used again last.
double optimum(const Trace& trace, size_t capacity) {
  std::vector<int32_t> accesses;
  for (const auto& ids : trace) accesses.insert(accesses.end(), ids.begin(), ids.end());
  constexpr size_t kNever = SIZE_MAX;
  std::vector<size_t> next(accesses.size(), kNever);
  std::unordered_map<int32_t, size_t> seen;
  for (size_t i = accesses.size(); i-- > 0;) {
    if (const auto found = seen.find(accesses[i]); found != seen.end()) next[i] = found->second;
    seen[accesses[i]] = i;
  }
  std::set<std::pair<size_t, int32_t>> cache;  // next use, id
  std::unordered_map<int32_t, size_t> cached;
  uint64_t hits = 0;
  for (size_t i = 0; i < accesses.size(); ++i) {
    const int32_t id = accesses[i];
    if (const auto found = cached.find(id); found != cached.end()) {
      ++hits;
      cache.erase({found->second, id});
    } else if (cache.size() == capacity) {
      const auto last = std::prev(cache.end());
      if (last->first < next[i]) continue;  // the newcomer itself is used last: it is not kept
      cached.erase(last->second);
      cache.erase(last);
    }
    cache.emplace(next[i], id);
    cached[id] = next[i];
  }
  return static_cast<double>(hits) / static_cast<double>(accesses.size());
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{
      "Hit rates of a request trace in device, host and disk tiers, by eviction policy, beside the offline optimum."};
  std::string path;
  std::vector<int32_t> sizes = {1'000, 5'000, 20'000};
  std::vector<int32_t> segments = {8, 32, 128};
  bool as_json = false;
  app.add_option("--segments", segments, "blocks a segment on disk, one after the other; with three tiers")
      ->capture_default_str()
      ->check(CLI::Range(1, 1'000'000));
  app.add_option("--trace", path, "JSON lines with \"hash_ids\"; without it a trace is made")->check(CLI::ExistingFile);
  app.add_option("--blocks", sizes, "blocks of device, host and disk")
      ->capture_default_str()
      ->expected(1, 3)
      ->check(CLI::Range(1, 100'000'000));
  app.add_flag("--json", as_json, "print one JSON object");
  CLI11_PARSE(app, argc, argv);
  const Trace trace = path.empty() ? made_trace() : read_trace(path);
  if (trace.empty()) {
    fmt::print(stderr, "error: {} has no request\n", path);
    return 2;
  }
  constexpr std::array<const char*, 3> kTiers = {"device", "host", "disk"};

  nlohmann::ordered_json json = {{"trace", path.empty() ? "made" : path},
                                 {"requests", trace.size()},
                                 {"blocks", sizes},
                                 {"policies", nlohmann::ordered_json::array()}};
  // What goes down is kept above as well, so the largest tier holds what all hold together, or more.
  size_t distinct = 0;
  for (const int32_t size : sizes) distinct += static_cast<size_t>(size);
  const double best = optimum(trace, distinct);
  const double unbounded = optimum(trace, SIZE_MAX);
  for (const EvictionPolicy policy :
       {EvictionPolicy::kLru, EvictionPolicy::kFifo, EvictionPolicy::kLfu, EvictionPolicy::kS3Fifo}) {
    const Hits hits = replay(trace, sizes, policy);
    nlohmann::ordered_json row = {{"policy", name(policy)}};
    double all = 0;
    for (size_t tier = 0; tier < sizes.size(); ++tier) {
      row[kTiers[tier]] = hits.rate(tier);
      all += hits.rate(tier);
    }
    row["all"] = all;
    row["of_optimum"] = all / best;
    json["policies"].push_back(row);
  }
  if (sizes.size() == 3) {
    for (const int32_t segment : segments) {
      for (const bool again : {false, true}) {
        IndexTiers tiers(sizes[1], sizes[2], segment, again);
        const Hits hits = replay_index(trace, sizes, tiers);
        const double all = hits.rate(0) + hits.rate(1) + hits.rate(2);
        json["policies"].push_back({{"policy", fmt::format("{}{}", segment, again ? " again" : "")},
                                    {"device", hits.rate(0)},
                                    {"host", hits.rate(1)},
                                    {"disk", hits.rate(2)},
                                    {"all", all},
                                    {"of_optimum", all / best},
                                    {"reinserted", tiers.reinserted()}});
      }
    }
  }
  json["optimum"] = best;
  json["unbounded"] = unbounded;
  if (as_json) {
    std::cout << json.dump(2) << '\n';
    return 0;
  }
  fmt::print("{} requests; share of their blocks found, by tier ({} blocks)\n{:<10}", trace.size(),
             fmt::join(sizes, ", "), "policy");
  for (size_t tier = 0; tier < sizes.size(); ++tier) fmt::print("{:>9}", kTiers[tier]);
  fmt::print("{:>9}   of the optimum\n", "all");
  for (const auto& row : json["policies"]) {
    fmt::print("{:<10}", row["policy"].get<std::string>());
    for (size_t tier = 0; tier < sizes.size(); ++tier) fmt::print("{:>8.1f}%", 100 * row[kTiers[tier]].get<double>());
    fmt::print("{:>8.1f}%   {:.0f} %\n", 100 * row["all"].get<double>(), 100 * row["of_optimum"].get<double>());
  }
  fmt::print("numbers: host by LRU, disk by segments of so many blocks; again: what was used is appended again\n");
  fmt::print("optimum {:.1f} % (Belady, one cache of {} blocks); without a bound {:.1f} %\n", 100 * best, distinct,
             100 * unbounded);
  return 0;
}
