// SPDX-License-Identifier: Apache-2.0
// TestRank: the memory of one rank of a TestEngine: several regions for each tag, in no order of addresses.
#pragma once

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "allocator/host_device.h"
#include "base/units.h"
#include "engine/rank_memory.h"
#include "engine/reference/scattered_regions.h"
#include "tests/support/faulty_device.h"
#include "tests/support/results.h"
#include "tests/support/test_engine_options.h"

namespace torpor::test {

struct TestRank {
  std::unique_ptr<RankMemory> memory;
  FaultyDevice* device = nullptr;
  reference::ScatteredBytes weights{};
  std::vector<DeviceAddress> kv{};  // by layer
  reference::StepRegions runtime{};

  bool is_asleep() const {
    const auto states = memory->states();
    const auto state = states.find(reference::kRuntimeTag);
    return state != states.end() && state->second == RegionState::kDetached;
  }
  // Free a region of the runtime tag and allocate another, as a framework may at any time. Return the size of each.
  uint64_t exchange() {
    const FaultyDevice::Spared spared(*device);
    const uint64_t bytes = runtime.next_bytes();
    EXPECT_SUCCEEDS(runtime.exchange());
    return bytes;
  }
};

inline TestRank make_rank(const TestEngineOptions& options, int rank, FileSystem& file_system) {
  static std::atomic<uint64_t> made_before = 0;  // each rank allocates in another order
  auto device = std::make_unique<FaultyDevice>(value_of(
      make_host_device({.capacity_bytes = options.device_capacity_bytes, .defer_copies = options.defer_copies})));
  TestRank made{.memory = nullptr, .device = device.get()};
  made.memory = value_of(RankMemory::create(std::move(device), options.files_of(rank, file_system),
                                            {.rank = rank,
                                             .arena_budget_bytes = options.arena_budget_bytes,
                                             .arena_slab_bytes = options.arena_slab_bytes,
                                             .free_memory = options.free_memory,
                                             .handle_bytes = options.handle_bytes,
                                             .threads = 2,
                                             .own_threads = options.own_threads,
                                             .retain_kv_bytes = options.retain_kv_bytes,
                                             .host_compression = options.host_compression,
                                             .key = options.key,
                                             .spill_dir = options.spill_dir,
                                             .encrypt = options.key != nullptr,
                                             .spill_staging_bytes = 2 * kPage}));
  const auto seed = static_cast<uint64_t>(rank) + 1;
  const uint64_t order = ++made_before;
  RankMemory& memory = *made.memory;
  made.weights =
      value_of(reference::ScatteredBytes::allocate(memory, "weights", kWeightBytes, seed, order, options.regions));
  made.kv = value_of(reference::allocate_kv(
      memory, {.layers = kKvLayers, .blocks = options.num_blocks, .block_bytes = kBlockBytes, .spare = {1000}}, order));
  made.runtime = value_of(reference::StepRegions::allocate(memory, reference::kRuntimeTag, kRuntimeBytes, seed, order));
  return made;
}

}  // namespace torpor::test
