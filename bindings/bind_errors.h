// SPDX-License-Identifier: Apache-2.0
// Errors across the Python border: an Error value becomes an exception of torpor.errors, and back. Threads: those that
// hold the interpreter's lock.
#pragma once

#include <pybind11/pybind11.h>

#include "base/status.h"

namespace torpor {

// Raise the exception of torpor.errors that has this error's code.
[[noreturn]] void raise(const Error& error);

// Return what a Python hook raised as a value. torpor's own exceptions keep their code.
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
