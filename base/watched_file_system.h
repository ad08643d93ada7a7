// SPDX-License-Identifier: Apache-2.0
// A FileSystem in front of another one, which asks a function before every call. What it says no to is not done and
// fails with its error; before a file or directory is closed (`call` "close") it is only told.
//
// For checks and tests: that no lock is held over a call, that a call waits. Threads: as the one behind; the function
// is called from the threads that call. It outlives everything that was opened.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/file_system.h"

namespace torpor {

// `call`: the method's name. `name`: of the file or directory.
using FileCallCheck = std::function<Status(const char* call, const std::string& name)>;

// `inner` outlives the result.
std::unique_ptr<FileSystem> make_watched_file_system(FileSystem& inner, FileCallCheck before);

}  // namespace torpor
