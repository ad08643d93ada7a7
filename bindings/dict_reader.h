// SPDX-License-Identifier: Apache-2.0
// DictReader: reads the entries of a Python dict one by one. An entry that is missing, unknown or of another type
// raises InvalidArgument, which names it. Threads: those that hold the interpreter's lock.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include <fmt/core.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bind_errors.h"

namespace torpor {

class DictReader {
 public:
  DictReader(const pybind11::handle& object, std::string where) : where_(std::move(where)) {
    if (!PyDict_Check(object.ptr())) fail(where_, "a dict");
    dict_ = pybind11::reinterpret_borrow<pybind11::dict>(object);
    taken_.reserve(dict_.size());
  }

  [[noreturn]] static void fail(const std::string& where, const std::string& wanted) {
    raise(Error{.code = Code::kInvalidArgument,
                .what = fmt::format("{} must be {}", where, wanted),
                .next_step = "correct the call"});
  }

  bool has(const char* key) const { return PyDict_GetItemString(dict_.ptr(), key) != nullptr; }

  pybind11::object take(const char* key) {
    PyObject* item = PyDict_GetItemString(dict_.ptr(), key);
    if (item == nullptr) fail(fmt::format("{}.{}", where_, key), "given");
    taken_.push_back(key);
    return pybind11::reinterpret_borrow<pybind11::object>(item);
  }

  template <class T>
  void read(const char* key, T& value) {
    const pybind11::object item = take(key);
    try {
      value = item.cast<T>();
    } catch (const pybind11::cast_error&) {
      wrong_type<T>(item, fmt::format("{}.{}", where_, key));
    }
  }
  // Read an object that is not an entry of a dict. `where` names it in errors.
  template <class T>
  static void cast(const pybind11::handle& object, const std::string& where, T& value) {
    try {
      value = object.cast<T>();
    } catch (const pybind11::cast_error&) {
      wrong_type<T>(object, where);
    }
  }
  template <class T>
  void read_if_given(const char* key, T& value) {
    if (has(key)) read(key, value);
  }

  // Raise if an entry was not read. Each entry is read at most once, so comparing the numbers suffices.
  void finish() const {
    if (taken_.size() == dict_.size()) return;
    for (const auto& [key, item] : dict_) {
      const auto text = pybind11::str(key).cast<std::string>();
      const auto is_this = [&](const char* taken) { return text == taken; };
      if (std::none_of(taken_.begin(), taken_.end(), is_this))
        fail(fmt::format("{}.{}", where_, text), "left out: there is no such entry");
    }
  }

 private:
  template <class T>
  [[noreturn]] static void wrong_type(const pybind11::handle& object, const std::string& where) {
    fail(where, fmt::format("a {} (it is {})", pybind11::type_id<T>(), pybind11::repr(object).cast<std::string>()));
  }
  pybind11::dict dict_;
  std::string where_;
  std::vector<const char*> taken_;
};

}  // namespace torpor
