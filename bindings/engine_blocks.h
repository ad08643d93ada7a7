// SPDX-License-Identifier: Apache-2.0
// EngineBlocks: vLLM's BlockPool as DeviceBlocks. A block's content is known by its hash object: vLLM makes a new one
// each time it enters a block into the prefix cache, and drops it when the block is evicted (vllm/block_versions.py).
// Objects are kept, so that none comes to lie where another was.
//
// Threads: those that hold the interpreter's lock, one at a time. What Python raises is cleared: the block has no
// version then, or is not held. What the pool's own methods raise is logged.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <pybind11/pybind11.h>

#include "bindings/block_fields.h"
#include "kvcache/device_blocks.h"

namespace torpor {

class EngineBlocks final : public DeviceBlocks {
 public:
  // `pool`: vLLM's BlockPool. `block_tokens`: a hash of fewer tokens covers a part of its block only.
  EngineBlocks(const pybind11::object& pool, int64_t block_tokens);
  ~EngineBlocks() override;

  ContentVersion version(int32_t block) const override;
  void hold(std::span<const int32_t> blocks, std::span<const ContentVersion> versions,
            std::span<uint8_t> held) override;
  void release(std::span<const int32_t> blocks) override;

  int64_t held() const { return held_; }
  int64_t size() const { return static_cast<int64_t>(known_.size()); }
  // Ends all holds at once, though their blocks go on being read: from now on the versions decide. The release() that
  // belongs to each of them does nothing.
  void release_all();

  // The block's number and, if it is full and entered into the prefix cache, its key but for the space.
  bool key_of(PyObject* block, BlockKey& key) const;
  int32_t number_of(PyObject* block) const;  // -1: it has none
  // They are asked for soon: first the block, a while later what it names.
  void prefetch(PyObject* block) const;
  void prefetch_values(PyObject* block) const;
  // The one behind it in the free queue; null or None: there is none.
  pybind11::object next_free(PyObject* block) const { return next_.get(block); }

 private:
  struct Known {
    PyObject* object = nullptr;  // kept
    ContentVersion version = ContentVersion::kNone;
  };
  PyObject* hash_object(PyObject* block) const;  // borrowed from the block; null: it has none
  bool call(const pybind11::object& method, std::span<const int32_t> blocks);
  void tell_failure(const pybind11::object& method, size_t blocks) const;
  bool count_one(int32_t block, int64_t more);
  bool pool_only_counts() const;

  const pybind11::object pool_;
  const pybind11::list blocks_;
  const pybind11::object touch_;
  const pybind11::object free_;
  const int64_t block_tokens_;
  PyTypeObject* const type_;  // kept alive by its blocks
  const BlockField hash_;
  const BlockField hash_tokens_;
  const BlockField number_;
  const BlockField references_;
  const BlockField owner_;
  const BlockField next_;
  mutable std::vector<Known> known_;  // by block
  mutable uint64_t last_ = 0;
  struct Holds {
    int32_t now = 0;
    int32_t released = 0;  // of which the release() is to come
  };
  std::vector<Holds> holds_;  // by block
  std::vector<int32_t> few_;  // of one call
  int64_t held_ = 0;
};

}  // namespace torpor
