// SPDX-License-Identifier: Apache-2.0
// The file system of the Python module.
#pragma once

#include <string>

#include <pybind11/pybind11.h>

#include "base/file_system.h"

namespace torpor {

// The machine's. With TORPOR_CHECK_FILE_CALLS in the environment, as in the tests, a call of a file by a thread that
// holds the interpreter's lock fails by name, and a close then ends the process.
FileSystem& module_files();

// The same check for files that are read otherwise. `call`: what is about to be done.
Status check_file_call(const char* call, const std::string& name);

// Calls `function` without the interpreter's lock, and has it again afterwards.
template <class Function>
auto without_lock(const Function& function) {
  const pybind11::gil_scoped_release released;
  return function();
}

}  // namespace torpor
