// SPDX-License-Identifier: Apache-2.0
// Arrays and sequences of Python, in one piece.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include <pybind11/pybind11.h>

#include "bindings/dict_reader.h"

namespace torpor {

// An array.array of `format`, filled by one copy.
template <class T>
pybind11::object to_array(const char* format, const std::vector<T>& items) {
  return pybind11::module_::import("array").attr("array")(
      format, pybind11::bytes(reinterpret_cast<const char*>(items.data()), items.size() * sizeof(T)));
}

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

// Iterates a list or tuple; anything else is refused by name.
inline pybind11::sequence sequence_from(const pybind11::handle& object, const std::string& where) {
  if (!PyList_Check(object.ptr()) && !PyTuple_Check(object.ptr())) DictReader::fail(where, "a list");
  return pybind11::reinterpret_borrow<pybind11::sequence>(object);
}

}  // namespace torpor
