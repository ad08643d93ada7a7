// SPDX-License-Identifier: Apache-2.0
// PythonPolicy: a BlockPolicy that asks a Python function (torpor/vllm/policy.py), which bounds the time of the user's
// class.
//
// Threads: those that hold the interpreter's lock, one at a time.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <utility>

#include "kvcache/block_policy.h"

namespace torpor {

class PythonPolicy final : public BlockPolicy {
 public:
  // `ask(question, request, keys, groups)` returns a byte for each key, 0 or 1, or None if there is no answer.
  explicit PythonPolicy(pybind11::object ask) : ask_(std::move(ask)) {}

  bool choose(PolicyQuestion question, std::string_view request, std::span<const BlockKey> keys,
              std::span<uint8_t> keep) override {
    namespace py = pybind11;
    try {
      py::list hashes(keys.size());
      py::list groups(keys.size());
      for (size_t i = 0; i < keys.size(); ++i) {
        hashes[i] = py::bytes(reinterpret_cast<const char*>(keys[i].hash.data()), keys[i].hash.size());
        groups[i] = keys[i].group;
      }
      const py::object answer =
          ask_(static_cast<int>(question), py::str(request.data(), request.size()), hashes, groups);
      if (answer.is_none()) return false;
      const auto bytes = answer.cast<std::string>();
      if (bytes.size() != keep.size()) return false;
      for (size_t i = 0; i < keep.size(); ++i) keep[i] = static_cast<uint8_t>(bytes[i] != 0);
      return true;
    } catch (py::error_already_set& raised) {
      // Only what is meant for the engine's thread itself comes so far, such as Ctrl-C: it is raised again there.
      if (raised.matches(PyExc_KeyboardInterrupt)) PyErr_SetInterrupt();
      return false;
    }
  }

 private:
  pybind11::object ask_;
};

}  // namespace torpor
