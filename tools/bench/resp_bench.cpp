// SPDX-License-Identifier: Apache-2.0
// KV blocks to a Redis server and back by RespStore: for remote_bench.py, which starts the server and has its own
// benchmark beside this.
#include <iostream>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "remote/resp_store.h"
#include "tools/bench/block_rates.h"

int main(int argc, char** argv) {
  using namespace torpor;
  std::string url;
  bench::BlockLoad load;
  CLI::App app("KV blocks to a Redis server and back");
  app.add_option("--url", url)->required();
  app.add_option("--bytes", load.bytes);
  app.add_option("--blocks", load.blocks);
  app.add_option("--threads", load.threads);
  app.add_option("--batch", load.batch);
  CLI11_PARSE(app, argc, argv);
  const auto store = bench::must(remote::RespStore::open(
      {.url = url, .slots = load.blocks, .record_bytes = load.bytes, .timeout = std::chrono::seconds(60)},
      system_clock()));
  const SealId fresh = random_seal_id();  // a namespace of this run
  store->open_space(1, digest_of(std::as_bytes(std::span(fresh))));
  const bench::BlockRates rates = bench::block_rates(*store, load);
  std::cout << nlohmann::json{{"put_gb_per_s", rates.put_gb_per_s}, {"get_gb_per_s", rates.get_gb_per_s}}.dump()
            << std::endl;
  return 0;
}
