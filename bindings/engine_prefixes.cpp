// SPDX-License-Identifier: Apache-2.0
#include "bindings/engine_prefixes.h"

#include <algorithm>
#include <string>

#include "base/log.h"

namespace py = pybind11;

namespace torpor {

py::bytes EnginePrefixes::name_of(const BlockKey& key) const {
  std::string name(reinterpret_cast<const char*>(key.hash.data()), std::min(hash_bytes_, key.hash.size()));
  for (int shift = 24; shift >= 0; shift -= 8) name += static_cast<char>(key.group >> shift & 255);
  return {name};
}

py::list EnginePrefixes::blocks_of(const BlockKey& key) const {
  py::list found;
  if (hash_bytes_ == 0) return found;
  const py::object cached = pool_.attr("cached_block_hash_to_block").attr("_cache").attr("get")(name_of(key));
  if (py::isinstance<py::dict>(cached)) {
    for (const auto& [number, block] : cached.cast<py::dict>()) found.append(block);
  } else if (!cached.is_none()) {
    found.append(cached);
  }
  return found;
}

int32_t EnginePrefixes::find(const BlockKey& key) const {
  try {
    for (const py::handle block : blocks_of(key)) {
      const int32_t number = blocks_.number_of(block.ptr());
      if (blocks_.version(number) != ContentVersion::kNone) return number;
    }
  } catch (const py::error_already_set& problem) {
    log().error("vLLM's prefix cache cannot be read: {}", problem.what());
  }
  return -1;
}

EnginePrefixes::Evicted EnginePrefixes::evict(const BlockKey& key) {
  Evicted evicted;
  try {
    py::set unused;
    for (const py::handle block : blocks_of(key)) {
      if (block.attr("ref_cnt").cast<int64_t>() > 0) {
        ++evicted.in_use;
      } else {
        unused.add(block.attr("block_id"));
      }
    }
    if (!unused.empty()) pool_.attr("evict_blocks")(unused);
    evicted.blocks = unused.size();
  } catch (const py::error_already_set& problem) {
    log().error("vLLM's prefix cache does not evict a block, which stays: {}", problem.what());
  }
  return evicted;
}

py::list EnginePrefixes::blocks_of(std::span<const int32_t> numbers) const {
  py::list blocks;
  const py::list all = pool_.attr("blocks");
  for (const int32_t number : numbers) blocks.append(all[static_cast<size_t>(number)]);
  return blocks;
}

void EnginePrefixes::call(const char* method, std::span<const int32_t> blocks) const {
  if (blocks.empty()) return;
  try {
    pool_.attr(method)(blocks_of(blocks));
  } catch (const py::error_already_set& problem) {
    log().error("vLLM's BlockPool.{}() of {} blocks: {}", method, blocks.size(), problem.what());
  }
}

size_t EnginePrefixes::free_blocks() const {
  try {
    return pool_.attr("get_num_free_blocks")().cast<size_t>();
  } catch (const py::error_already_set& problem) {
    log().error("vLLM's free blocks cannot be counted: {}", problem.what());
    return 0;
  }
}

std::vector<int32_t> EnginePrefixes::take(size_t blocks) {
  std::vector<int32_t> numbers;
  numbers.reserve(blocks);
  if (blocks == 0 || blocks > free_blocks()) return numbers;
  try {
    for (const py::handle block : pool_.attr("get_new_blocks")(blocks))
      numbers.push_back(blocks_.number_of(block.ptr()));
  } catch (const py::error_already_set& problem) {
    log().error("vLLM does not give {} free blocks: {}", blocks, problem.what());
    numbers.clear();
  }
  return numbers;
}

void EnginePrefixes::use(std::span<const int32_t> blocks) { call("touch", blocks); }

void EnginePrefixes::release(std::span<const int32_t> blocks) { call("free_blocks", blocks); }

bool EnginePrefixes::enter(std::span<const BlockKey> prefix, int32_t block) {
  const BlockKey& key = prefix.back();
  try {
    pool_.attr("_insert_block_hash")(name_of(key), blocks_of(std::span(&block, 1))[0],
                                     static_cast<int64_t>(prefix.size()) * block_tokens_);
    if (remembers_ && entered_.size() < kMostEntered)
      entered_.push_back({.key = key, .parent = prefix.size() > 1 ? prefix[prefix.size() - 2].hash : Hash{}});
    return true;
  } catch (const py::error_already_set& problem) {
    log().error("vLLM's prefix cache does not take a block, whose tokens are computed again: {}", problem.what());
    return false;
  }
}

}  // namespace torpor
