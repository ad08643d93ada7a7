// SPDX-License-Identifier: Apache-2.0
#include "bindings/engine_prefixes.h"

#include <algorithm>
#include <string>

#include "base/log.h"

namespace py = pybind11;

namespace torpor {

py::list EnginePrefixes::blocks_of(const BlockKey& key) const {
  py::list found;
  if (hash_bytes_ == 0) return found;
  std::string name(reinterpret_cast<const char*>(key.hash.data()), std::min(hash_bytes_, key.hash.size()));
  for (int shift = 24; shift >= 0; shift -= 8) name += static_cast<char>(key.group >> shift & 255);
  const py::object cached = pool_.attr("cached_block_hash_to_block").attr("_cache").attr("get")(py::bytes(name));
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

}  // namespace torpor
