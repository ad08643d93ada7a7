// KV blocks to a Redis server and back by RespStore, digests taken and checked: for remote_bench.py, which starts the
// server and has its own benchmark beside this.
#include <atomic>
#include <iostream>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/page_buffer.h"
#include "remote/resp_store.h"
#include "tools/bench/bench.h"

namespace {

using namespace torpor;
using bench::must;

// Each thread its share of the blocks, so many at a time.
double seconds_of(Store& store, std::vector<StorePart>& parts, int threads, size_t batch, bool put) {
  return bench::seconds([&] {
    std::atomic<size_t> next = 0;
    std::vector<std::thread> all;
    for (int thread = 0; thread < threads; ++thread) {
      all.emplace_back([&] {
        for (size_t at = 0; (at = next.fetch_add(batch)) < parts.size();) {
          const std::span<StorePart> some = std::span(parts).subspan(at, std::min(batch, parts.size() - at));
          put ? store.put(some) : store.get(some);
        }
      });
    }
    for (std::thread& thread : all) thread.join();
    for (StorePart& part : parts) must(std::move(part.status));
  });
}

}  // namespace

int main(int argc, char** argv) {
  std::string url;
  uint64_t bytes = 2 << 20;
  int32_t blocks = 64;
  int threads = 1;
  size_t batch = 4;
  CLI::App app("KV blocks to a Redis server and back");
  app.add_option("--url", url)->required();
  app.add_option("--bytes", bytes);
  app.add_option("--blocks", blocks);
  app.add_option("--threads", threads);
  app.add_option("--batch", batch);
  CLI11_PARSE(app, argc, argv);
  const auto store = must(remote::RespStore::open(
      {.url = url, .slots = blocks, .record_bytes = bytes, .timeout = std::chrono::seconds(60)}, system_clock()));
  const SealId fresh = random_seal_id();  // a key space of this run
  store->open_space(1, digest_of(std::as_bytes(std::span(fresh))));
  PageBuffer memory;
  const std::span<std::byte> room = memory.room(bytes * static_cast<uint64_t>(blocks));
  std::memset(room.data(), 5, room.size());
  std::vector<StorePart> parts;
  for (int32_t i = 0; i < blocks; ++i) {
    BlockKey key{.space = 1};
    std::memcpy(key.hash.data(), &i, sizeof i);
    const std::span<std::byte> block = room.subspan(static_cast<uint64_t>(i) * bytes, bytes);
    std::memcpy(block.data(), &i, sizeof i);
    parts.push_back({.slot = i, .key = key, .record = {.digest = digest_of(block)}, .bytes = block});
  }
  const double all = static_cast<double>(bytes) * blocks / 1e9;
  const double put = all / seconds_of(*store, parts, threads, batch, true);
  const double get = all / seconds_of(*store, parts, threads, batch, false);
  std::cout << nlohmann::json{{"put_gb_per_s", put}, {"get_gb_per_s", get}}.dump() << std::endl;
  return 0;
}
