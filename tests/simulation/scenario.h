// SPDX-License-Identifier: Apache-2.0
// Scenario: everything that happens in one run, drawn from its seed: options, requests, sleeps, faults. ReferenceRun:
// the tokens of the same requests without any disturbance.
#pragma once

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <fmt/core.h>

#include "allocator/host_device.h"
#include "console/engine_view.h"
#include "console/reference_run.h"
#include "console/source_events.h"
#include "engine/reference/reference_engine.h"
#include "engine/sleep_controller.h"
#include "engine/tags.h"
#include "tests/support/manual_clock.h"

namespace torpor::test {

using namespace std::chrono_literals;
using console::SourceEvents;
using reference::ReferenceEngine;
using reference::ReferenceOptions;
using reference::ReferenceOutput;
using reference::ReferenceRequest;
using reference::Sampling;

// Bounds for the tokens that an engine's KV blocks hold: each request fits. Exact scenarios may have more.
constexpr int64_t kFewestBlockedTokens = 64;
constexpr int64_t kMostBlockedTokens = 90;

struct Failed {  // ends a simulation
  std::string what;
};

struct Arrival {
  int step = 0;
  ReferenceRequest request;
  int32_t samples = 1;
};

struct Scenario {
  bool exact = false;
  ReferenceOptions options;
  bool late_copies = false;
  uint64_t shuffle_seed = 0;
  int ranks = 1;
  std::vector<Arrival> arrivals;
  std::map<std::string, int> aborts;  // id -> step
  std::optional<uint64_t> kv_budget;
  double sleep_chance = 0;
  double fault_chance = 0;  // for each step, sleep or wake
  double cancel_chance = 0;
  bool unproven = false;  // one copy is never proven finished
};

class Dice {
 public:
  explicit Dice(uint64_t seed) : random_(seed) {}
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random_() % static_cast<uint64_t>(high - low + 1));
  }
  bool chance(double share) { return static_cast<double>(random_() >> 11) * 0x1.0p-53 < share; }
  template <class T>
  T one_of(std::initializer_list<T> items) {
    return *(items.begin() + between(0, static_cast<int64_t>(items.size()) - 1));
  }

 private:
  std::mt19937_64 random_;
};

inline Scenario make_scenario(uint64_t seed, Dice& dice, const std::string& directory) {
  Scenario scenario;
  scenario.exact = seed % 2 == 0;
  ReferenceOptions& options = scenario.options;
  options.model.block_tokens = static_cast<int32_t>(dice.one_of({2, 4, 8}));
  options.model.layers = static_cast<uint32_t>(dice.between(1, 3));
  options.model.token_bytes = dice.one_of({16u, 32u});
  options.weight_bytes = static_cast<uint64_t>(dice.between(100, 9000));
  options.weights_seed = seed;
  options.token_budget = static_cast<int32_t>(dice.between(3, 24));
  options.max_running = static_cast<int32_t>(dice.between(1, 6));
  options.by_priority = dice.chance(0.3);
  options.kv_of_step = scenario.exact;  // S1: a wrong copy under the right key changes tokens
  options.transfers_have_threads = seed % 4 < 2;
  options.deferred_thread = false;               // its order could not be repeated
  options.deferred_job_bytes = seed % 5 * 4096;  // a block, some, most
  options.retain_kv_bytes = seed % 3 * 20'000;   // nothing, some blocks, most
  // Dice of its own, so that the layout of memory does not change what else happens in a seed.
  Dice shape(seed * 7919u + 5);
  options.regions_per_tag = static_cast<size_t>(shape.between(1, 5));
  options.spare_kv_regions = static_cast<size_t>(shape.between(0, 5 - options.model.layers));
  for (const char* tag : {reference::kGraphTag, kWorkspaceTag}) {
    if (shape.chance(0.5)) options.step_tags.emplace_back(tag);
  }
  options.model.bf16 = seed % 7 < 4;
  if (seed % 7 < 3) options.host_compression = Codec::kBf16;
  options.num_blocks =
      static_cast<int32_t>(dice.between(kFewestBlockedTokens, scenario.exact ? 140 : kMostBlockedTokens) /
                           options.model.block_tokens);  // each request fits, but not all together
  scenario.late_copies = dice.chance(0.5);
  scenario.shuffle_seed = dice.chance(0.5) ? seed + 1 : 0;
  scenario.sleep_chance = dice.one_of({0.03, 0.1, 0.3});
  if (!scenario.exact) {
    scenario.fault_chance = dice.one_of({0.0, 0.02, 0.1});
    scenario.cancel_chance = dice.one_of({0.0, 0.1});
    scenario.unproven = dice.chance(0.03);
    if (dice.chance(0.3)) scenario.kv_budget = static_cast<uint64_t>(dice.between(0, 3000));
  }
  scenario.ranks = dice.one_of({1, 1, 2});
  reference::TierOptions& tiers = options.tiers;
  // Exact scenarios only store and hold nothing, so that every step is that of the reference run.
  tiers.mode = scenario.exact ? OffloadMode::kLazy : dice.one_of({OffloadMode::kEager, OffloadMode::kLazy});
  tiers.loads = !scenario.exact;
  tiers.disk_directory = directory + "/tier";
  if (dice.chance(0.8)) tiers.host_blocks = static_cast<int32_t>(dice.between(4, 60));
  if (dice.chance(0.5)) tiers.disk_blocks = static_cast<int32_t>(dice.between(4, 60));
  tiers.placement.presence = dice.chance(0.7);
  if (dice.chance(0.2)) tiers.counted_keys = 1000, tiers.placement.min_uses = 2;
  tiers.offload = {.max_batch_size = static_cast<int32_t>(dice.between(1, 16)),
                   .min_batch_size = 1,
                   .flush_interval = std::chrono::milliseconds(dice.between(0, 20)),
                   .sweep_interval = std::chrono::milliseconds(dice.between(1, 20)),
                   .on_deck_batches = static_cast<int32_t>(dice.between(1, 3)),
                   .queue_blocks = dice.one_of<int64_t>({8, 1000})};

  std::vector<std::vector<int32_t>> stems(3);
  for (auto& stem : stems) {
    for (int64_t i = dice.between(1, 24); i > 0; --i) stem.push_back(static_cast<int32_t>(dice.between(0, 99)));
  }
  const int64_t requests = scenario.exact ? dice.between(3, 9) : dice.between(5, 14);
  for (int64_t number = 0; number < requests; ++number) {
    Arrival arrival{.step = static_cast<int>(dice.between(0, scenario.exact ? 25 : 60))};
    ReferenceRequest& request = arrival.request;
    request.id = fmt::format("r{}", number);
    request.prompt = stems[static_cast<size_t>(dice.between(0, 2))];
    for (int64_t i = dice.between(0, 12); i > 0; --i)
      request.prompt.push_back(static_cast<int32_t>(dice.between(0, 99)));
    request.max_tokens = static_cast<int32_t>(dice.between(1, 20));
    request.priority = static_cast<int32_t>(dice.between(0, 2));
    request.sampling = scenario.exact ? dice.one_of({Sampling::kGreedy, Sampling::kSeeded, Sampling::kUnseeded})
                                      : dice.one_of({Sampling::kGreedy, Sampling::kSeeded});
    request.seed = dice.between(0, 1000);
    request.salt = dice.chance(0.2) ? 7 : 0;
    if (dice.chance(0.2)) arrival.samples = 2;
    if (dice.chance(0.1) && arrival.samples == 1)
      scenario.aborts[request.id] = static_cast<int>(dice.between(arrival.step, arrival.step + 25));
    scenario.arrivals.push_back(std::move(arrival));
  }
  return scenario;
}

template <class T>
T must(Result<T> result, std::string_view doing) {
  if (!result) throw Failed{fmt::format("{}: {}", doing, result.error().to_string())};
  return std::move(*result);
}
inline void must(const Status& status, std::string_view doing) {
  if (!status) throw Failed{fmt::format("{}: {}", doing, status.error().to_string())};
}

using Streams = std::map<std::string, std::vector<int32_t>>;

// The tokens of the reference run; for exact scenarios also the output of each step.
struct ReferenceRun {
  Streams streams;
  std::vector<std::vector<std::pair<std::string, int32_t>>> steps;
};

inline ReferenceRun run_reference(const Scenario& scenario) {
  ManualClock clock;
  ReferenceOptions options = scenario.options;
  options.tiers = {};
  if (!scenario.exact) options.num_blocks = 1000;  // more than enough
  std::vector<std::unique_ptr<DeviceMemory>> devices;
  for (int rank = 0; rank < scenario.ranks; ++rank) devices.push_back(must(make_host_device(), "device"));
  const auto engine =
      must(ReferenceEngine::create(std::move(devices), linux_file_system(), clock, options), "the reference run");
  ReferenceRun reference;
  for (int step = 0; step < 10'000; ++step) {
    bool more = !engine->idle();
    for (const Arrival& arrival : scenario.arrivals) {
      more = more || arrival.step >= step;
      if (arrival.step == step) must(engine->add(arrival.request, arrival.samples), "add");
    }
    if (scenario.exact) {  // otherwise an aborted stream is compared as a prefix
      for (const auto& [id, at] : scenario.aborts) {
        if (at == step) engine->abort(id);
      }
    }
    if (!more) return reference;
    auto& outputs = reference.steps.emplace_back();
    for (const ReferenceOutput& output : engine->step()) {
      reference.streams[output.id].push_back(output.token);
      outputs.emplace_back(output.id, output.token);
    }
  }
  throw Failed{"the reference run does not come to an end"};
}

}  // namespace torpor::test
