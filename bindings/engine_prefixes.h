// SPDX-License-Identifier: Apache-2.0
// EnginePrefixes: vLLM's prefix cache on the device, as Residency sees it.
//
// Owner: the scheduler's side of the connector. Threads: those that hold the interpreter's lock, one at a time.
// Failure: an exception of the pool is logged; the block is then not found, or stays.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/engine_blocks.h"
#include "kvcache/residency.h"

namespace torpor {

class EnginePrefixes final : public DeviceCache {
 public:
  // `pool`: vLLM's BlockPool. `blocks` is over the same pool, and outlives this object.
  EnginePrefixes(const pybind11::object& pool, const EngineBlocks& blocks) : pool_(pool), blocks_(blocks) {}

  // Note the length of the engine's hashes, which keys pad with zeros. Nothing is found before.
  void set_hash_bytes(size_t bytes) { hash_bytes_ = bytes; }
  int32_t find(const BlockKey& key) const override;
  Evicted evict(const BlockKey& key) override;

 private:
  // Return vLLM's blocks of this key.
  pybind11::list blocks_of(const BlockKey& key) const;

  const pybind11::object pool_;
  const EngineBlocks& blocks_;
  size_t hash_bytes_ = 0;
};

}  // namespace torpor
