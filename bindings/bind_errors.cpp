// SPDX-License-Identifier: Apache-2.0
#include "bindings/bind_errors.h"

#include <fmt/core.h>

namespace py = pybind11;

namespace torpor {

void raise(const Error& error) {
  const py::object exception = py::module_::import("torpor.errors")
                                   .attr("make")(std::string(name(error.code)), error.what, error.next_step,
                                                 std::string(name(error.origin)), error.native, error.state_changed);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  throw py::error_already_set();
}

Error error_from(py::error_already_set& raised) {
  const py::object& exception = raised.value();
  if (!py::isinstance(exception, py::module_::import("torpor.errors").attr("Error"))) {
    return Error{.code = Code::kInternal,
                 .what = fmt::format("the engine raised {}", raised.what()),
                 .next_step = "see the engine's log",
                 .origin = Origin::kEngine};
  }
  Error error{.what = exception.attr("what").cast<std::string>(),
              .next_step = exception.attr("next_step").cast<std::string>(),
              .origin = Origin::kEngine,
              .state_changed = exception.attr("state_changed").cast<bool>()};
  const auto code = exception.attr("code").cast<std::string>();
  for (int i = 0; i <= static_cast<int>(kLastCode); ++i) {
    if (name(static_cast<Code>(i)) == code) error.code = static_cast<Code>(i);
  }
  return error;
}

}  // namespace torpor
