// SPDX-License-Identifier: Apache-2.0
// What offloading costs the scheduler a step: so many blocks stored and so many loaded while so many requests run, on
// two ranks, with an index that is full. No bytes move: reports are made up.
//
// CPU time of the scheduler's thread, by hook, median of the steps. Baseline: the same steps with what one would write
// first: an unordered_map from key to slot, a list in order of use, a map of blocks under way, a lock.
#include <time.h>

#include <cstring>
#include <functional>
#include <iostream>
#include <list>
#include <mutex>
#include <random>
#include <unordered_map>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "kvcache/offload_scheduler.h"
#include "tools/bench/bench.h"

using namespace torpor;
using namespace torpor::bench;

namespace {

struct Shape {
  int32_t stored = 119;
  int32_t loaded = 19;
  int32_t running = 128;
  int32_t host_slots = 100'000;
  int32_t device_blocks = 20'000;
  int32_t chain = 24;   // keys that a new request asks for
  int32_t offers = 24;  // requests whose blocks became full, a step
  int32_t ranks = 2;
};

BlockKey key_of(uint64_t number) {
  BlockKey key{.space = 1};
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
    return value;
  }
};

class Blocks final : public DeviceBlocks {
 public:
  explicit Blocks(int32_t count) : versions_(static_cast<size_t>(count)), holds_(static_cast<size_t>(count)) {}
  ContentVersion version(int32_t block) const override { return versions_[static_cast<size_t>(block)]; }
  void hold(std::span<const int32_t> blocks, std::span<const ContentVersion> versions,
            std::span<uint8_t> held) override {
    for (size_t i = 0; i < blocks.size(); ++i) {
      held[i] = version(blocks[i]) == versions[i] ? 1 : 0;
      holds_[static_cast<size_t>(blocks[i])] += held[i];
    }
  }
  void release(std::span<const int32_t> blocks) override {
    for (const int32_t block : blocks) --holds_[static_cast<size_t>(block)];
  }
  void write(int32_t block) { versions_[static_cast<size_t>(block)] = static_cast<ContentVersion>(++last_); }

 private:
  std::vector<ContentVersion> versions_;
  std::vector<int> holds_;
  uint64_t last_ = 0;
};

double now_us() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) * 1e-3;
}

struct Times {
  std::map<std::string, std::vector<double>> hooks;
  std::vector<double> steps;
};

// What a step brings: the same for both sides.
struct Step {
  std::vector<std::vector<BlockKey>> keys;  // of the requests whose blocks became full
  std::vector<std::vector<int32_t>> blocks;
  std::vector<BlockKey> chain;  // of the request that comes
  std::vector<int32_t> into;
};

class Steps {
 public:
  explicit Steps(const Shape& shape) : shape_(shape) {}
  Step next(Blocks& device) {
    Step step;
    int32_t left = shape_.stored;
    for (int32_t offer = 0; offer < shape_.offers; ++offer) {
      const int32_t count = offer + 1 == shape_.offers ? left : offer % 8 == 0 ? std::min(left, shape_.stored / 4) : 1;
      std::vector<BlockKey> keys;
      std::vector<int32_t> blocks;
      for (int32_t i = 0; i < std::min(count, left); ++i) {
        block_ = (block_ + 1) % shape_.device_blocks;
        device.write(block_);
        keys.push_back(key_of(next_++));
        blocks.push_back(block_);
      }
      left -= static_cast<int32_t>(keys.size());
      step.keys.push_back(std::move(keys));
      step.blocks.push_back(std::move(blocks));
    }
    // What was stored a while ago, and then keys that are nowhere.
    const uint64_t past = next_ - static_cast<uint64_t>(shape_.host_slots) / 2 - random_() % 1000;
    for (int32_t i = 0; i < shape_.chain; ++i)
      step.chain.push_back(key_of(i < shape_.loaded ? past + static_cast<uint64_t>(i) : (uint64_t{1} << 50) + next_));
    for (int32_t i = 0; i < shape_.loaded; ++i) {
      block_ = (block_ + 1) % shape_.device_blocks;
      device.write(block_);
      step.into.push_back(block_);
    }
    return step;
  }

 private:
  const Shape shape_;
  std::mt19937_64 random_{1};
  uint64_t next_ = 0;
  int32_t block_ = 0;
};

Times measure_ours(const Shape& shape, OffloadMode mode, int rounds) {
  Blocks device(shape.device_blocks);
  const auto placement = make_placement({});
  const auto scheduler =
      must(OffloadScheduler::create({.index = {.host_slots = shape.host_slots, .device_blocks = shape.device_blocks},
                                     .ranks = shape.ranks,
                                     .mode = mode},
                                    device, *placement, system_clock()));
  Steps steps(shape);
  Times times;
  std::vector<uint32_t> finishing;
  std::vector<uint32_t> running;
  for (int32_t i = 0; i < shape.running; ++i) running.push_back(scheduler->begin_request(fmt::format("running-{}", i)));
  const int warm = 2 * shape.host_slots / shape.stored + 10;
  Bytes plan;
  std::vector<uint64_t> sent;
  for (int round = 0; round < warm + rounds; ++round) {
    const Step step = steps.next(device);
    const bool measured = round >= warm;
    double sum = 0;
    const auto hook = [&](const char* name, const std::function<void()>& work) {
      const double began = now_us();
      work();
      const double taken = now_us() - began;
      sum += taken;
      if (measured) times.hooks[name].push_back(taken);
    };
    uint32_t request = 0;
    int32_t found = 0;
    hook("match", [&] {
      request = scheduler->begin_request("request-with-a-name-of-usual-length");
      found = scheduler->match(request, step.chain, 0);
    });
    if (measured && found != shape.loaded) std::exit(2);
    hook("allocated",
         [&] { (void)scheduler->allocated(request, std::span(step.into).first(static_cast<size_t>(found))); });
    hook("offer", [&] {
      for (size_t i = 0; i < step.keys.size(); ++i)
        (void)scheduler->offer(
            {.keys = step.keys[i], .blocks = step.blocks[i], .after_step = static_cast<uint64_t>(round)});
    });
    hook("plan", [&] {
      scheduler->acknowledge(static_cast<uint64_t>(round));
      const TransferPlan& made = scheduler->plan_step();
      sent.clear();
      for (const PlannedJob& job : made.jobs) sent.push_back(job.id);
      plan = made.encode();
    });
    std::vector<Bytes> reports;
    for (int32_t rank = 0; rank < shape.ranks; ++rank) {
      TransferReport report{.rank = rank};
      for (const uint64_t id : sent) report.jobs.push_back({.id = id});
      reports.push_back(report.encode());
    }
    hook("apply", [&] {
      for (const Bytes& report : reports) must(scheduler->apply(must(TransferReport::decode(report))));
    });
    hook("finished", [&] {
      for (const EndedLoad& load : scheduler->take_loads())
        scheduler->loaded(load.request, std::span(step.into).first(static_cast<size_t>(load.good_blocks)));
      if (!scheduler->finished(request)) std::exit(2);
    });
    if (measured) times.steps.push_back(sum);
  }
  return times;
}

// The naive one.
class Baseline {
 public:
  explicit Baseline(int32_t slots) {
    for (int32_t slot = slots; slot-- > 0;) free_.push_back(slot);
  }
  int32_t match(std::span<const BlockKey> chain, std::vector<Slot>& slots) {
    const std::lock_guard lock(mutex_);
    for (const BlockKey& key : chain) {
      const auto found = index_.find(key);
      if (found == index_.end()) break;
      ++found->second.pins;
      order_.splice(order_.end(), order_, found->second.place);
      slots.push_back(found->second.slot);
    }
    return static_cast<int32_t>(slots.size());
  }
  void unpin(std::span<const BlockKey> chain) {
    const std::lock_guard lock(mutex_);
    for (const BlockKey& key : chain) --index_.find(key)->second.pins;
  }
  void offer(const std::vector<BlockKey>& keys, const std::vector<int32_t>& blocks, Blocks& device) {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < keys.size(); ++i) {
      if (!index_.contains(keys[i])) queue_.push_back({keys[i], blocks[i], device.version(blocks[i])});
    }
  }
  void plan(Blocks& device) {
    const std::lock_guard lock(mutex_);
    for (const Waiting& waiting : queue_) {
      uint8_t held = 0;
      device.hold({&waiting.block, 1}, {&waiting.version, 1}, {&held, 1});
      if (held == 0) continue;
      if (free_.empty()) {
        auto oldest = order_.begin();
        while (index_.find(*oldest)->second.pins > 0) ++oldest;
        free_.push_back(index_.find(*oldest)->second.slot);
        index_.erase(*oldest);
        order_.erase(oldest);
      }
      under_way_.emplace(waiting.key, std::pair(waiting.block, free_.back()));
      free_.pop_back();
    }
    queue_.clear();
  }
  void apply(Blocks& device) {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, what] : under_way_) {
      index_[key] = {what.second, 0, order_.insert(order_.end(), key)};
      device.release({&what.first, 1});
    }
    under_way_.clear();
  }

 private:
  struct Entry {
    Slot slot = -1;
    int pins = 0;
    std::list<BlockKey>::iterator place;
  };
  struct Waiting {
    BlockKey key;
    int32_t block;
    ContentVersion version;
  };
  std::mutex mutex_;
  std::unordered_map<BlockKey, Entry, KeyHash> index_;
  std::list<BlockKey> order_;
  std::vector<Slot> free_;
  std::vector<Waiting> queue_;
  std::unordered_map<BlockKey, std::pair<int32_t, Slot>, KeyHash> under_way_;
};

Times measure_baseline(const Shape& shape, int rounds) {
  Blocks device(shape.device_blocks);
  Baseline baseline(shape.host_slots);
  Steps steps(shape);
  Times times;
  const int warm = 2 * shape.host_slots / shape.stored + 10;
  for (int round = 0; round < warm + rounds; ++round) {
    const Step step = steps.next(device);
    const double began = now_us();
    std::vector<Slot> slots;
    const int32_t found = baseline.match(step.chain, slots);
    for (size_t i = 0; i < step.keys.size(); ++i) baseline.offer(step.keys[i], step.blocks[i], device);
    baseline.plan(device);
    baseline.apply(device);
    baseline.unpin(std::span(step.chain).first(static_cast<size_t>(found)));
    if (round >= warm) times.steps.push_back(now_us() - began);
  }
  return times;
}

nlohmann::ordered_json result_of(const Times& times, const Times& baseline) {
  nlohmann::ordered_json json;
  json["step_us"] = median(times.steps);
  json["baseline_us"] = median(baseline.steps);
  for (const auto& [hook, taken] : times.hooks) json["hooks_us"][hook] = median(taken);
  return json;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"CPU time of the offload scheduler a step, with no bytes moved."};
  Shape shape;
  int rounds = 2000;
  bool as_json = false;
  app.add_option("--stored", shape.stored, "blocks stored a step")->capture_default_str()->check(CLI::Range(1, 10'000));
  app.add_option("--loaded", shape.loaded, "blocks loaded a step")->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_option("--running", shape.running, "requests")->capture_default_str()->check(CLI::Range(1, 10'000));
  app.add_option("--offers", shape.offers, "requests with full blocks a step")
      ->capture_default_str()
      ->check(CLI::Range(1, 1000));
  app.add_option("--slots", shape.host_slots, "in host memory")
      ->capture_default_str()
      ->check(CLI::Range(10'000, 10'000'000));
  app.add_option("--rounds", rounds, "measured steps")->capture_default_str()->check(CLI::Range(10, 1'000'000));
  app.add_flag("--json", as_json, "print one JSON object");
  CLI11_PARSE(app, argc, argv);
  shape.chain = std::max(shape.chain, shape.loaded + 1);
  Shape lazy = shape;
  if (shape.stored == 119 && shape.loaded == 19) lazy.stored = 83, lazy.loaded = 16;
  nlohmann::ordered_json json = {{"running", shape.running}, {"slots", shape.host_slots}, {"rounds", rounds}};
  for (const auto& [name, of, mode] :
       {std::tuple("eager", shape, OffloadMode::kEager), std::tuple("lazy", lazy, OffloadMode::kLazy)}) {
    nlohmann::ordered_json part = {{"stored", of.stored}, {"loaded", of.loaded}};
    part.update(result_of(measure_ours(of, mode, rounds), measure_baseline(of, rounds)));
    json[name] = part;
  }
  if (as_json) {
    std::cout << json.dump(2) << '\n';
    return 0;
  }
  fmt::print("{} requests, {} slots, median of {} steps, CPU time\n", shape.running, shape.host_slots, rounds);
  for (const char* mode : {"eager", "lazy"}) {
    const auto& row = json[mode];
    fmt::print("{:>6}: {} blocks stored, {} loaded: {:.1f} us a step, baseline {:.1f} us;", mode,
               row["stored"].get<int>(), row["loaded"].get<int>(), row["step_us"].get<double>(),
               row["baseline_us"].get<double>());
    for (const auto& [hook, taken] : row["hooks_us"].items()) fmt::print(" {} {:.1f}", hook, taken.get<double>());
    fmt::print("\n");
  }
  return 0;
}
