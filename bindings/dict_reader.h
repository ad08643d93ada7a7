// DictReader: takes the entries of a Python dict one by one and refuses what is missing, unknown or of another type.
#pragma once

#include <set>
#include <string>

#include <fmt/format.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bind_errors.h"

namespace torpor {

class DictReader {
 public:
  DictReader(const pybind11::handle& object, std::string where) : where_(std::move(where)) {
    if (!PyDict_Check(object.ptr())) fail(where_, "a dict");
    dict_ = pybind11::reinterpret_borrow<pybind11::dict>(object);
  }

  [[noreturn]] static void fail(const std::string& where, const std::string& wanted) {
    raise(Error{.code = Code::kInvalidArgument, .what = fmt::format("{} must be {}", where, wanted), .next_step = "correct the call"});
  }

  bool has(const char* key) const { return dict_.contains(key); }

  pybind11::object take(const char* key) {
    if (!dict_.contains(key)) fail(fmt::format("{}.{}", where_, key), "given");
    taken_.insert(key);
    return dict_[key];
  }

  template <class T>
  void read(const char* key, T& value) {
    const pybind11::object item = take(key);
    try {
      value = item.cast<T>();
    } catch (const pybind11::cast_error&) {
      fail(fmt::format("{}.{}", where_, key), fmt::format("a {} (it is {})", pybind11::type_id<T>(), pybind11::repr(item).cast<std::string>()));
    }
  }
  template <class T>
  void read_if_given(const char* key, T& value) {
    if (has(key)) read(key, value);
  }

  // Refuses entries that nobody took.
  void finish() const {
    for (const auto& [key, item] : dict_) {
      const auto text = pybind11::str(key).cast<std::string>();
      if (!taken_.contains(text)) fail(fmt::format("{}.{}", where_, text), "left out: there is no such entry");
    }
  }

 private:
  pybind11::dict dict_;
  std::string where_;
  std::set<std::string> taken_;
};

}  // namespace torpor
