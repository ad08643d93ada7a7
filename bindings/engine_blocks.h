// SPDX-License-Identifier: Apache-2.0
// EngineBlocks: vLLM's BlockPool as DeviceBlocks. A block's content is identified by its hash object: vLLM makes a new
// one each time it enters a block into the prefix cache, and drops it when the block is evicted
// (vllm/block_versions.py). This class keeps a reference, so that no other object gets the same address.
//
// Owner: the scheduler's side of the connector. Threads: those that hold the interpreter's lock, one at a time.
// Failure: Python exceptions are cleared; the block then has no version, or is not held. Exceptions of the pool's own
// methods are logged.
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
  // `pool`: vLLM's BlockPool. `block_tokens`: of each KV cache group; a hash of fewer tokens covers only a part of its
  // block. `partial`: such a hash is a key, too. What was stored under it has the content of this part; the engine may
  // go on to fill the block.
  EngineBlocks(const pybind11::object& pool, std::vector<int64_t> block_tokens, bool partial);
  ~EngineBlocks() override;

  ContentVersion version(int32_t block) const override;
  void hold(std::span<const int32_t> blocks, std::span<const ContentVersion> versions,
            std::span<uint8_t> held) override;
  void release(std::span<const int32_t> blocks) override;

  int64_t held() const { return held_; }
  int64_t size() const { return static_cast<int64_t>(known_.size()); }
  // End all holds at once, though copies may still read the blocks: from now on their versions decide. The release()
  // that belongs to each hold does nothing then.
  void release_all();

  // Return whether the block is in the prefix cache, and is full or partial ones are keys; then set the key, except
  // `space`.
  bool key_of(PyObject* block, BlockKey& key) const;
  // Return whether a block with a hash is filled up to the last token of its group's blocks.
  bool is_full(int32_t block) const;
  int32_t number_of(PyObject* block) const;                                                 // -1: it has none
  PyObject* block(int32_t number) const { return PyList_GET_ITEM(blocks_.ptr(), number); }  // borrowed
  // Load the block into the cache, as it is needed soon; then, a while later, the values that it refers to.
  void prefetch(PyObject* block) const;
  void prefetch_values(PyObject* block) const;
  // Return the next block of the free queue; null or None: there is none.
  pybind11::object next_free(PyObject* block) const { return next_.get(block); }

 private:
  struct Known {
    PyObject* object = nullptr;  // a reference
    ContentVersion version = ContentVersion::kNone;
  };
  PyObject* hash_object(PyObject* block) const;  // borrowed from the block; null: it has none
  bool is_full(uint32_t group, PyObject* block) const;
  bool has_key(uint32_t group, PyObject* block) const;
  bool call(const pybind11::object& method, std::span<const int32_t> blocks);
  void report_failure(const pybind11::object& method, size_t blocks) const;
  bool count_one(int32_t block, int64_t more);
  bool pool_only_counts() const;

  const pybind11::object pool_;
  const pybind11::list blocks_;
  const pybind11::object touch_;
  const pybind11::object free_;
  const std::vector<int64_t> block_tokens_;  // by group
  const bool partial_;
  PyTypeObject* const type_;  // kept alive by its blocks
  const BlockField hash_;
  const BlockField hash_tokens_;
  const BlockField number_;
  const BlockField references_;
  const BlockField owner_;
  const BlockField next_;
  mutable std::vector<Known> known_;  // by block number
  mutable uint64_t last_ = 0;
  struct Holds {
    int32_t now = 0;
    int32_t released = 0;  // holds that release_all() ended and whose release() is still to come
  };
  std::vector<Holds> holds_;  // by block number
  std::vector<int32_t> few_;  // buffer of one call
  int64_t held_ = 0;
};

}  // namespace torpor
