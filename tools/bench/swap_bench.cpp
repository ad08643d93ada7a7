// SPDX-License-Identifier: Apache-2.0
// One engine goes and another comes on its memory: a swap, beside a sleep and then a wake.
//
// Two engines of the same size, on devices whose link carries both directions at once, each at its own rate. In turn
// one falls asleep and then the other wakes, or both at once; every byte is copied each time, and compared afterwards.
#include <chrono>
#include <iostream>

#include <fmt/core.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/log.h"
#include "engine/sleep_controller.h"
#include "tools/bench/bench.h"
#include "tools/bench/bench_engine.h"

namespace {

using namespace torpor;
using bench::median;
using bench::must;

struct Sleeper {
  explicit Sleeper(const bench::Shape& shape)
      : engine(shape), controller(engine, linux_file_system(), system_clock(), {}) {}
  bench::Engine engine;
  SleepController controller;
};

double seconds_of_exchange(Sleeper& from, Sleeper& to, bool at_once) {
  from.engine.write_all();
  const double seconds = bench::seconds([&] {
    if (at_once) {
      must(SleepController::swap(from.controller, to.controller));
    } else {
      must(from.controller.sleep({.preserve_state = true}));
      must(to.controller.wake_up({}));
    }
  });
  to.engine.forget_tokens();
  to.engine.step();
  return seconds;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"A swap of two engines, beside a sleep of one and then a wake of the other."};
  uint64_t mib = 256;
  uint64_t block_kib = 512;
  uint32_t layers = 8;
  uint64_t page_mib = 4;
  int rounds = 5;
  double link = 0.25;
  bool as_json = false;
  app.add_option("--mib", mib, "of KV of each; the weights are half of it")
      ->capture_default_str()
      ->check(CLI::Range(64, 1 << 20));
  app.add_option("--block-kib", block_kib, "of a block")->capture_default_str()->check(CLI::Range(64, 1 << 16));
  app.add_option("--layers", layers, "over which a block lies")->capture_default_str()->check(CLI::Range(1, 64));
  app.add_option("--page-mib", page_mib, "of device memory that goes at once: of each layer a page")
      ->capture_default_str()
      ->check(CLI::Range(2, 64));
  app.add_option("--rounds", rounds, "measured rounds")->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_option("--link", link, "GB/s of the link to the device, each way; 0: as fast as memory")
      ->capture_default_str();
  app.add_flag("--json", as_json, "print one JSON object");
  CLI11_PARSE(app, argc, argv);

  log().set_level(LogLevel::kWarn);
  const uint64_t block = block_kib * kKiB / layers * layers;
  const bench::Shape shape{.kv_bytes = mib * kMiB / block * block,
                           .block_bytes = block,
                           .requests = 1,
                           .link_bytes_per_second = static_cast<uint64_t>(link * 1e9),
                           .layers = layers,
                           .handle_bytes = page_mib * kMiB,
                           .threads = link > 0 ? 1 : 0};  // a stream has the link for itself
  std::vector<double> apart, swapped;
  {
    Sleeper one(shape);
    Sleeper other(shape);
    must(other.controller.sleep({.preserve_state = true}));
    for (int round = 0; round <= rounds; ++round) {
      if (round == 1) apart.clear(), swapped.clear();
      apart.push_back(seconds_of_exchange(one, other, false));
      swapped.push_back(seconds_of_exchange(other, one, true));
    }
  }
  const double ratio = median(swapped) / median(apart);
  const nlohmann::ordered_json json = {{"bytes_each", shape.kv_bytes + shape.kv_bytes / 2},
                                       {"layers", layers},
                                       {"page_bytes", shape.handle_bytes},
                                       {"link_gb_per_second_each_way", link},
                                       {"rounds", rounds},
                                       {"one_after_the_other_seconds", median(apart)},
                                       {"swap_seconds", median(swapped)},
                                       {"swap_of_one_after_the_other", ratio}};
  if (as_json) {
    std::cout << json.dump(2) << '\n';
    return 0;
  }
  fmt::print("two engines of {} MiB, pages of {} MiB, {} GB/s each way; medians of {} rounds\n",
             (shape.kv_bytes + shape.kv_bytes / 2) / kMiB, page_mib, link, rounds);
  fmt::print("one after the other {:.2f} s, swap {:.2f} s: {:.2f}\n", median(apart), median(swapped), ratio);
  return 0;
}
