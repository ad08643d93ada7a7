// SPDX-License-Identifier: Apache-2.0
// Errors across the Python border: an Error value becomes an exception of torpor.errors, and back.
#pragma once

#include <pybind11/pybind11.h>

#include "base/status.h"

namespace torpor {

[[noreturn]] void raise(const Error& error);  // needs the interpreter lock

// What a Python hook raised, as a value: torpor's own exceptions keep their code.
Error error_from(pybind11::error_already_set& raised);

template <class T>
T value_or_raise(Result<T> result) {
  if (!result) raise(result.error());
  return std::move(*result);
}
inline void value_or_raise(const Status& status) {
  if (!status) raise(status.error());
}

}  // namespace torpor
