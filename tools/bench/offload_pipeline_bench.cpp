// What the offload pipeline costs per block when no bytes move: blocks of a pool are named weakly, go through the
// pipeline in containers of 64, are upgraded, handed to a route that does nothing, and counted.
//
// Baseline: the same blocks one by one through a queue with a mutex and a condition variable. Ceiling: naming and
// upgrading them without a pipeline. Interleaved, median of the rounds, after one that only warms; for pools of several
// sizes.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <iostream>
#include <mutex>
#include <thread>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "kvcache/block_routes.h"
#include "offload/offload_pipeline.h"
#include "tools/bench/bench.h"

namespace {

using namespace torpor;
using bench::median;
using bench::must;
using bench::seconds;

constexpr size_t kContainer = 64;

class NullRoute final : public BlockRoute {
 public:
  explicit NullRoute(BlockPool& pool) : pool_(pool) {}
  std::string_view name() const override { return "nowhere"; }
  bool present(const Digest&) const override { return false; }
  bool upgrade(const BlockName& block) override { return pool_.weak(block.id, block.generation).upgrade().has_value(); }
  void transfer(std::span<const BlockName>, std::span<BlockOutcome> outcomes) override {
    std::fill(outcomes.begin(), outcomes.end(), BlockOutcome::kTransferred);
  }

 private:
  BlockPool& pool_;
};

std::vector<BlockName> registered_blocks(BlockPool& pool, int32_t count) {
  std::vector<BlockName> names;
  for (int32_t i = 0; i < count; ++i) {
    MutableBlock block = std::move(must(pool.allocate(1))[0]);
    must(block.initialize({}, static_cast<uint64_t>(i)));
    must(block.add_tokens(std::vector<int32_t>{i}));
    must(block.schedule_compute());
    must(block.compute_done());
    const BlockRef shared = must(block.register_block());
    names.push_back(name_of(shared));
  }
  return names;
}

void through_pipeline(OffloadPipeline& pipeline, const std::vector<BlockName>& names) {
  for (size_t at = 0; at < names.size(); at += kContainer) {
    const size_t end = std::min(at + kContainer, names.size());
    pipeline.enqueue(
        {names.begin() + static_cast<std::ptrdiff_t>(at), names.begin() + static_cast<std::ptrdiff_t>(end)});
  }
  pipeline.drain();
}

void through_queue(NullRoute& route, const std::vector<BlockName>& names) {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<BlockName> queue;
  bool ended = false;
  std::thread taker([&] {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return !queue.empty() || ended; });
      if (queue.empty()) return;
      const BlockName block = queue.front();
      queue.pop_front();
      lock.unlock();
      route.upgrade(block);
      lock.lock();
    }
  });
  for (const BlockName& block : names) {
    {
      const std::lock_guard lock(mutex);
      queue.push_back(block);
    }
    changed.notify_one();
  }
  {
    const std::lock_guard lock(mutex);
    ended = true;
  }
  changed.notify_one();
  taker.join();
}

nlohmann::ordered_json measure(int32_t blocks, int rounds) {
  const auto pool = must(BlockPool::create({.num_blocks = blocks, .block_tokens = 1}));
  const std::vector<BlockName> names = registered_blocks(*pool, blocks);
  NullRoute route(*pool);
  const auto pipeline = must(
      OffloadPipeline::create(route, system_clock(), {.max_batch_size = kContainer, .queue_blocks = int64_t{1} << 40}));
  std::vector<double> ours, queue, direct;
  for (int round = 0; round <= rounds; ++round) {
    const double a = seconds([&] { through_pipeline(*pipeline, names); });
    const double b = seconds([&] { through_queue(route, names); });
    const double c = seconds(
        [&] { std::for_each(names.begin(), names.end(), [&](const BlockName& name) { route.upgrade(name); }); });
    if (round == 0) continue;
    ours.push_back(a), queue.push_back(b), direct.push_back(c);
  }
  const auto per_block = [&](const std::vector<double>& times) { return median(times) * 1e9 / blocks; };
  return {{"registered_blocks", blocks},
          {"pipeline_ns", per_block(ours)},
          {"baseline_ns", per_block(queue)},
          {"ceiling_ns", per_block(direct)},
          {"times_baseline", per_block(queue) / per_block(ours)},
          {"of_ceiling", per_block(direct) / per_block(ours)}};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Cost of the offload pipeline per block, with no bytes moved."};
  std::vector<int32_t> sizes = {1'000, 10'000, 100'000, 1'000'000};
  int rounds = 5;
  bool as_json = false;
  app.add_option("--blocks", sizes, "registered blocks")->capture_default_str()->check(CLI::Range(1, 10'000'000));
  app.add_option("--rounds", rounds, "measured rounds")->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_flag("--json", as_json, "print one JSON object");
  CLI11_PARSE(app, argc, argv);
  nlohmann::ordered_json json = {{"container", kContainer},
                                 {"rounds", rounds},
                                 {"unit", "ns per block, median"},
                                 {"pools", nlohmann::ordered_json::array()}};
  for (const int32_t blocks : sizes) json["pools"].push_back(measure(blocks, rounds));
  if (as_json) {
    std::cout << json.dump(2) << '\n';
    return 0;
  }
  fmt::print(
      "containers of {} blocks, median of {} rounds, ns per block\n{:>10} {:>9} {:>9} {:>9}   queue to pipeline, "
      "upgrade alone to pipeline\n",
      kContainer, rounds, "blocks", "pipeline", "queue", "upgrade");
  for (const auto& row : json["pools"]) {
    fmt::print("{:>10} {:>9.0f} {:>9.0f} {:>9.0f}   {:.2f} x, {:.0f} %\n", row["registered_blocks"].get<int32_t>(),
               row["pipeline_ns"].get<double>(), row["baseline_ns"].get<double>(), row["ceiling_ns"].get<double>(),
               row["times_baseline"].get<double>(), 100 * row["of_ceiling"].get<double>());
  }
  return 0;
}
