// SPDX-License-Identifier: Apache-2.0
// The file system of the Python module. Threads: any.
#pragma once

#include <string>

#include <pybind11/pybind11.h>

#include "base/file_system.h"

namespace torpor {

// Return the machine's file system. With TORPOR_CHECK_FILE_CALLS in the environment, as in the tests, a file call by a
// thread that holds the interpreter's lock fails, and the error names the call; closing a file then ends the process.
FileSystem& module_files();

// Make the same check for files that are read by other means. `call`: what is about to be done to `name`.
Status check_file_call(const char* call, const std::string& name);

// Call `function` without the interpreter's lock, and take the lock again afterwards.
template <class Function>
auto without_lock(const Function& function) {
  const pybind11::gil_scoped_release released;
  return function();
}

}  // namespace torpor
