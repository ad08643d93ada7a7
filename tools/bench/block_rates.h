// SPDX-License-Identifier: Apache-2.0
// Blocks to a remote store and back, digests taken and checked: what resp_bench and mooncake_bench measure.
#pragma once

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "base/digest.h"
#include "base/page_buffer.h"
#include "offload/slot_store.h"
#include "tools/bench/bench.h"

namespace torpor::bench {

struct BlockLoad {
  uint64_t bytes = 2 * kMiB;  // of a block
  int32_t blocks = 64;
  int threads = 1;
  size_t batch = 4;
};

struct BlockRates {
  double put_gb_per_s = 0;
  double get_gb_per_s = 0;
};

// Each thread its share of the blocks, so many at a time.
inline double seconds_of(SlotStore& store, std::span<RecordPart> parts, const BlockLoad& load, bool put) {
  return seconds([&] {
    std::atomic<size_t> next = 0;
    std::vector<std::thread> all;
    for (int thread = 0; thread < load.threads; ++thread) {
      all.emplace_back([&] {
        for (size_t at = 0; (at = next.fetch_add(load.batch)) < parts.size();) {
          const std::span<RecordPart> some = parts.subspan(at, std::min(load.batch, parts.size() - at));
          put ? store.put(some) : store.get(some);
        }
      });
    }
    for (std::thread& thread : all) thread.join();
    for (RecordPart& part : parts) must(std::move(part.status));
  });
}

// Into the namespace 1 of `store`, which has none of them. `warm`: so many of them first, which count for nothing.
inline BlockRates block_rates(SlotStore& store, const BlockLoad& load, size_t warm = 0) {
  PageBuffer memory;
  const std::span<std::byte> room = memory.room(load.bytes * static_cast<uint64_t>(load.blocks));
  std::memset(room.data(), 5, room.size());
  std::vector<BlockKey> keys(static_cast<size_t>(load.blocks), BlockKey{.space = 1});
  std::vector<SavedChunk> chunks(keys.size());
  std::vector<RecordPart> parts;
  for (size_t i = 0; i < keys.size(); ++i) {
    std::memcpy(keys[i].hash.data(), &i, sizeof i);
    const std::span<std::byte> block = room.subspan(i * load.bytes, load.bytes);
    std::memcpy(block.data(), &i, sizeof i);
    chunks[i] = {.digest = digest_of(block), .offset = i};
    parts.push_back({.chunk = &chunks[i], .bytes = block, .key = &keys[i]});
  }
  const std::span<RecordPart> first = std::span(parts).first(warm);
  const std::span<RecordPart> rest = std::span(parts).subspan(warm);
  if (warm != 0) seconds_of(store, first, load, true), seconds_of(store, first, load, false);
  const double all = static_cast<double>(load.bytes * rest.size()) / 1e9;
  BlockRates rates;
  rates.put_gb_per_s = all / seconds_of(store, rest, load, true);
  rates.get_gb_per_s = all / seconds_of(store, rest, load, false);
  return rates;
}

}  // namespace torpor::bench
