// SPDX-License-Identifier: Apache-2.0
// Python arrays and sequences, copied in one piece. Threads: those that hold the interpreter's lock.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include <pybind11/pybind11.h>

#include "bindings/dict_reader.h"

namespace torpor {

// Return an array.array of `format`, filled by one copy.
template <class T>
pybind11::object to_array(const char* format, const std::vector<T>& items) {
  return pybind11::module_::import("array").attr("array")(
      format, pybind11::bytes(reinterpret_cast<const char*>(items.data()), items.size() * sizeof(T)));
}

// Copy a buffer into a vector. Raises InvalidArgument, which names `where`, if it has gaps or more than one dimension.
template <class T>
std::vector<T> from_buffer(const pybind11::buffer_info& info, const std::string& where) {
  if (info.ndim != 1 || (info.shape[0] > 0 && info.strides[0] != info.itemsize))
    DictReader::fail(where, "a one-dimensional array without gaps");
  std::vector<T> items(static_cast<size_t>(info.shape[0]));
  if (!items.empty()) std::memcpy(items.data(), info.ptr, items.size() * sizeof(T));
  return items;
}

inline bool is_array(const pybind11::handle& object) {
  return PyObject_CheckBuffer(object.ptr()) != 0 && !PyBytes_Check(object.ptr());
}

// Return a list or tuple as a sequence. Anything else raises InvalidArgument, which names `where`.
inline pybind11::sequence sequence_from(const pybind11::handle& object, const std::string& where) {
  if (!PyList_Check(object.ptr()) && !PyTuple_Check(object.ptr())) DictReader::fail(where, "a list");
  return pybind11::reinterpret_borrow<pybind11::sequence>(object);
}

}  // namespace torpor
