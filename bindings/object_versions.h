// SPDX-License-Identifier: Apache-2.0
// ObjectVersions: versions of KV blocks (KvBlock::version) for an engine in Python that has an object of its own for
// each content of a block: the same object, the same version. Objects are kept, so that none comes to lie where another
// was.
//
// Threads: those that hold the interpreter's lock.
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
  // `objects`: that of each of `blocks`; None: it has no version, which is 0. Blocks that are not listed are forgotten.
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
