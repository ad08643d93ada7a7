// SPDX-License-Identifier: Apache-2.0
// ObjectVersions: content versions of KV blocks (KvBlock::version) for an engine in Python that has one object for each
// content of a block: the same object means the same version. This class keeps references, so that no other object gets
// the same address.
//
// Owner: PythonHooks. Threads: those that hold the interpreter's lock.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include <fmt/core.h>
#include <pybind11/pybind11.h>

#include "bindings/dict_reader.h"

namespace torpor {

class ObjectVersions {
 public:
  // Return the version of each block. `objects`: the object of each block; None: the block has no version, and gets 0.
  // Blocks that are not listed are forgotten. Raises InvalidArgument if the lengths differ.
  std::vector<uint64_t> give(const pybind11::list& objects, const std::vector<int32_t>& blocks) {
    if (objects.size() != blocks.size()) {
      DictReader::fail("capture.versions.objects",
                       fmt::format("a list of {} (it has {})", blocks.size(), objects.size()));
    }
    std::vector<uint64_t> versions(blocks.size());
    std::unordered_map<int32_t, Known> present;
    present.reserve(blocks.size());
    for (size_t i = 0; i < blocks.size(); ++i) {
      const pybind11::handle object = PyList_GET_ITEM(objects.ptr(), static_cast<Py_ssize_t>(i));
      if (object.is_none()) continue;
      const auto known = known_.find(blocks[i]);
      const bool same = known != known_.end() && known->second.object.is(object);
      versions[i] = same ? known->second.version : ++last_;
      present.emplace(blocks[i], Known{pybind11::reinterpret_borrow<pybind11::object>(object), versions[i]});
    }
    known_.swap(present);
    return versions;
  }

 private:
  struct Known {
    pybind11::object object;
    uint64_t version = 0;
  };
  std::unordered_map<int32_t, Known> known_;  // by block
  uint64_t last_ = 0;
};

}  // namespace torpor
