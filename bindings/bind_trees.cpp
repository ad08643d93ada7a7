// SPDX-License-Identifier: Apache-2.0
// Bytes and trees of plain values, to and from Python.
#include <fmt/core.h>
#include <pybind11/stl.h>

#include "bindings/bind_values.h"
#include "bindings/python_arrays.h"

namespace py = pybind11;

namespace torpor {

py::bytes to_python(const Bytes& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

Bytes bytes_from(const py::handle& object, const std::string& where) {
  if (!PyBytes_Check(object.ptr())) DictReader::fail(where, "bytes");
  const char* data = PyBytes_AS_STRING(object.ptr());
  return {data, data + PyBytes_GET_SIZE(object.ptr())};
}

Value value_from(const py::handle& object, int depth) {
  if (depth > kMaxValueDepth) DictReader::fail("a value", fmt::format("at most {} levels deep", kMaxValueDepth));
  Value value;
  if (object.is_none()) {
  } else if (PyBool_Check(object.ptr())) {
    value.data = object.ptr() == Py_True;
  } else if (PyLong_Check(object.ptr())) {
    int64_t number = 0;
    DictReader::cast(object, "a number in a value", number);
    value.data = number;
  } else if (PyFloat_Check(object.ptr())) {
    value.data = object.cast<double>();
  } else if (PyUnicode_Check(object.ptr())) {
    value.data = object.cast<std::string>();
  } else if (PyBytes_Check(object.ptr())) {
    value.data = bytes_from(object, "a value");
  } else if (PyDict_Check(object.ptr())) {
    Dict dict;
    for (const auto& [key, item] : py::reinterpret_borrow<py::dict>(object)) {
      if (!PyUnicode_Check(key.ptr())) DictReader::fail("a key of a value", "a string");
      dict.emplace_back(key.cast<std::string>(), value_from(item, depth + 1));
    }
    value.data = std::move(dict);
  } else if (PyList_Check(object.ptr()) || PyTuple_Check(object.ptr())) {
    List list;
    for (const py::handle item : object) list.push_back(value_from(item, depth + 1));
    value.data = std::move(list);
  } else if (is_array(object)) {
    const py::buffer_info info = py::reinterpret_borrow<py::buffer>(object).request();
    if (info.format == "d") {
      value.data = from_buffer<double>(info, "a value");
    } else if (info.itemsize == 8 && (info.format == "q" || info.format == "l")) {
      value.data = from_buffer<int64_t>(info, "a value");
    } else {
      DictReader::fail("an array in a value", "array('q') or array('d')");
    }
  } else {
    DictReader::fail(fmt::format("a value of type {}", py::str(py::type::of(object)).cast<std::string>()),
                     "plain data");
  }
  return value;
}

py::object to_python(const Value& value) {
  return std::visit(
      []<class T>(const T& content) -> py::object {
        if constexpr (std::is_same_v<T, std::monostate>) {
          return py::none();
        } else if constexpr (std::is_same_v<T, Bytes>) {
          return to_python(content);
        } else if constexpr (std::is_same_v<T, IntArray>) {
          return to_array("q", content);
        } else if constexpr (std::is_same_v<T, RealArray>) {
          return to_array("d", content);
        } else if constexpr (std::is_same_v<T, List>) {
          py::list list;
          for (const Value& item : content) list.append(to_python(item));
          return list;
        } else if constexpr (std::is_same_v<T, Dict>) {
          py::dict dict;
          for (const auto& [key, item] : content) dict[py::str(key)] = to_python(item);
          return dict;
        } else {
          return py::cast(content);
        }
      },
      value.data);
}

}  // namespace torpor
