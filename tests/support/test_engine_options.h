// SPDX-License-Identifier: Apache-2.0
// TestEngineOptions: the size and the settings of a TestEngine.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/file_system.h"
#include "base/seal.h"
#include "offload/chunk.h"

namespace torpor::test {

inline constexpr int32_t kBlockTokens = 4;
inline constexpr uint64_t kKvTokenBytes = 32;  // in each layer
inline constexpr uint32_t kKvLayers = 2;
inline constexpr uint64_t kBlockBytes = kBlockTokens * kKvTokenBytes;
inline constexpr uint64_t kWeightBytes = 200'000;
inline constexpr uint64_t kRuntimeBytes = 6'000;  // written in each step, so each sleep copies them
inline constexpr uint64_t kFreshGenerator = 42;

struct TestEngineOptions {
  int ranks = 1;
  FileSystem* files_of_last_rank = nullptr;  // null: the same as the other ranks
  int32_t num_blocks = 64;
  bool exchange_asleep = true;  // false: for tests that count pages of a sleeping engine
  size_t regions = 3;           // of weights; the other tags have as many
  uint64_t weights_seed = 1;
  bool defer_copies = false;
  uint64_t arena_budget_bytes = 0;
  uint64_t arena_slab_bytes = 1ull << 20;
  std::function<std::optional<uint64_t>()> free_memory{};  // as in RankMemoryOptions
  uint64_t device_capacity_bytes = 0;
  uint64_t handle_bytes = 64ull << 20;
  std::optional<uint64_t> retain_kv_bytes;
  Codec host_compression = Codec::kNone;
  bool bf16 = false;  // weights and KV resemble bf16 values, whose exponents lie close together
  std::string spill_dir;
  // KV bytes depend on the step too: equal keys are not equal bytes.
  bool mix_steps = false;
  std::shared_ptr<const Key> key;  // for sealed checkpoints
  bool incremental = false;        // of checkpoints
  bool always_read_weights = false;
  // Return the file system of `rank`; `others`: that of all ranks but the last.
  FileSystem& files_of(int rank, FileSystem& others) const {
    return rank == ranks - 1 && files_of_last_rank != nullptr ? *files_of_last_rank : others;
  }
  bool own_threads = true;  // false: the calling thread does background work
};

}  // namespace torpor::test
