// SPDX-License-Identifier: Apache-2.0
// EnginePrefixes: vLLM's prefix cache on the device, as Residency sees it.
//
// Owner: the scheduler's side of the connector. Threads: those that hold the interpreter's lock, one at a time.
// Failure: an exception of the pool is logged; the block is then not found, or stays.
#pragma once

#include <array>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>

#include "bindings/engine_blocks.h"
#include "kvcache/residency.h"

namespace torpor {

class EnginePrefixes final : public DeviceCache {
 public:
  // `pool`: vLLM's BlockPool. `blocks` is over the same pool, and outlives this object.
  EnginePrefixes(const pybind11::object& pool, const EngineBlocks& blocks, int64_t block_tokens)
      : pool_(pool), blocks_(blocks), block_tokens_(block_tokens) {}

  // Note the length of the engine's hashes, which keys pad with zeros. Nothing is found before.
  void set_hash_bytes(size_t bytes) { hash_bytes_ = bytes; }
  int32_t find(const BlockKey& key) const override;
  Evicted evict(const BlockKey& key) override;
  size_t free_blocks() const override;
  std::vector<int32_t> take(size_t blocks) override;
  void use(std::span<const int32_t> blocks) override;
  bool enter(std::span<const BlockKey> prefix, int32_t block) override;
  void release(std::span<const int32_t> blocks) override;
  using Hash = std::array<uint8_t, 32>;
  struct Entered {
    BlockKey key;
    Hash parent{};  // hash of the block before it
  };
  // Return the blocks that were entered since the last call, at most kMostEntered. Nothing is remembered before
  // remember_entered().
  static constexpr size_t kMostEntered = size_t{1} << 16;
  void remember_entered() { remembers_ = true; }
  std::vector<Entered> take_entered() { return std::exchange(entered_, {}); }

 private:
  // Return vLLM's name of this key.
  pybind11::bytes name_of(const BlockKey& key) const;
  // Return vLLM's blocks of this key.
  pybind11::list blocks_of(const BlockKey& key) const;
  pybind11::list blocks_of(std::span<const int32_t> numbers) const;
  void call(const char* method, std::span<const int32_t> blocks) const;

  const pybind11::object pool_;
  const EngineBlocks& blocks_;
  const int64_t block_tokens_;
  size_t hash_bytes_ = 0;
  bool remembers_ = false;
  std::vector<Entered> entered_;
};

}  // namespace torpor
