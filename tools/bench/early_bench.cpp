// SPDX-License-Identifier: Apache-2.0
// The first token of a post-copy wake, beside a wake that brings back everything before it.
//
// An engine of weights and twice as much KV, all of it of running requests, falls asleep to host memory, or to disk,
// and wakes, whole and early in turn. A token of a request is made by reading all of its KV and comparing it with what
// was there before the sleep. Told are, from the call of wake_up() on: when a whole wake returns, when the first
// request has its token, and when the last one has. Each round wakes both ways, after one that only warms.
#include <chrono>
#include <iostream>

#include <fmt/core.h>
#include <CLI/CLI.hpp>
#include <boost/filesystem.hpp>
#include <nlohmann/json.hpp>

#include "base/log.h"
#include "engine/sleep_controller.h"
#include "tools/bench/bench.h"
#include "tools/bench/bench_engine.h"

namespace {

using namespace torpor;
using bench::Engine;
using bench::median;
using bench::must;
using bench::Shape;

struct Times {  // seconds from the call on
  std::vector<double> returned, first_token, last_token;
};

void cycle(Engine& engine, SleepController& controller, bool to_disk, bool early, Times& times) {
  engine.write_all();
  engine.forget_tokens();
  must(controller.sleep({.preserve_state = true, .to_disk = to_disk}));
  const auto began = std::chrono::steady_clock::now();
  const auto since = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count(); };
  const SleepReport report = must(controller.wake_up({.early = early}));
  times.returned.push_back(since());
  if (early == (report.deferred_blocks == 0))
    must(Status(Error{.code = Code::kInternal, .what = "it did not wake so"}));
  engine.step();
  if (engine.done() == 0)
    must(Status(Error{.code = Code::kInternal, .what = "no request has a token of its first step"}));
  // A whole wake has all of its first tokens from one step: the first is there when one request was read.
  times.first_token.push_back(since());
  if (early) {
    for (int64_t left = 1; left > 0;) {
      left = must(controller.continue_wake(DeferredWait::kSome)).left;
      engine.step();
    }
  }
  times.last_token.push_back(since());
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"The first and the last token of a post-copy wake, beside a wake that brings back everything first."};
  uint64_t mib = 1024;
  uint64_t block_kib = 512;
  int32_t requests = 64;
  int rounds = 7;
  double link = 0;
  bool to_disk = false;
  bool as_json = false;
  std::string directory = "/tmp";
  app.add_option("--mib", mib, "of KV; the weights are half of it")
      ->capture_default_str()
      ->check(CLI::Range(64, 1 << 20));
  app.add_option("--block-kib", block_kib, "of a block")->capture_default_str()->check(CLI::Range(4, 1 << 16));
  app.add_option("--requests", requests, "that run")->capture_default_str()->check(CLI::Range(1, 4096));
  app.add_option("--rounds", rounds, "measured rounds")->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_option("--link", link, "GB/s of the link to the device; 0: as fast as memory")->capture_default_str();
  app.add_flag("--disk", to_disk, "sleep to disk");
  app.add_option("--directory", directory, "for checkpoints")->capture_default_str();
  app.add_flag("--json", as_json, "print one JSON object");
  CLI11_PARSE(app, argc, argv);

  log().set_level(LogLevel::kWarn);
  Shape shape{.kv_bytes = mib * kMiB,
              .block_bytes = block_kib * kKiB,
              .requests = requests,
              .link_bytes_per_second = static_cast<uint64_t>(link * 1e9)};
  if (shape.blocks_each() < 1)
    must(Status(Error{.code = Code::kInvalidArgument, .what = "fewer blocks than requests"}));
  shape.kv_bytes = static_cast<uint64_t>(shape.blocks_each()) * static_cast<uint64_t>(requests) * shape.block_bytes;
  const boost::filesystem::path place =
      boost::filesystem::path(directory) / boost::filesystem::unique_path("torpor-early-%%%%%%%%");
  boost::filesystem::create_directory(place);
  boost::filesystem::permissions(place, boost::filesystem::owner_all);
  Times whole, early;
  {
    Engine engine(shape);
    SleepController controller(engine, linux_file_system(), system_clock(), {.directory = place.string()});
    for (int round = 0; round <= rounds; ++round) {
      if (round == 1) whole = early = {};
      cycle(engine, controller, to_disk, false, whole);
      cycle(engine, controller, to_disk, true, early);
    }
  }
  boost::filesystem::remove_all(place);

  const double wake = median(whole.returned);
  const nlohmann::ordered_json json = {
      {"weights_bytes", shape.kv_bytes / 2},
      {"kv_bytes", shape.kv_bytes},
      {"requests", requests},
      {"from", to_disk ? "disk" : "host"},
      {"rounds", rounds},
      {"whole", {{"wake_seconds", wake}, {"last_token_seconds", median(whole.last_token)}}},
      {"early",
       {{"wake_seconds", median(early.returned)},
        {"first_token_seconds", median(early.first_token)},
        {"last_token_seconds", median(early.last_token)}}},
      {"first_token_of_whole_wake", median(early.first_token) / wake},
      {"last_token_of_whole", median(early.last_token) / median(whole.last_token)}};
  if (as_json) {
    std::cout << json.dump(2) << '\n';
    return 0;
  }
  fmt::print("{} MiB of weights, {} MiB of KV of {} requests, from {}; medians of {} rounds, ms\n",
             shape.kv_bytes / 2 / kMiB, shape.kv_bytes / kMiB, requests, to_disk ? "disk" : "host memory", rounds);
  fmt::print("{:<6} {:>8} {:>12} {:>11}\n", "", "wake_up", "first token", "last token");
  for (const auto& [name, times] : {std::pair("whole", &whole), std::pair("early", &early)}) {
    fmt::print("{:<6} {:>8.1f} {:>12.1f} {:>11.1f}\n", name, 1e3 * median(times->returned),
               1e3 * median(times->first_token), 1e3 * median(times->last_token));
  }
  fmt::print("first token {:.2f} of a whole wake, last token {:.2f} of the whole wake's\n",
             json["first_token_of_whole_wake"].get<double>(), json["last_token_of_whole"].get<double>());
  return 0;
}
