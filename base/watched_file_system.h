// SPDX-License-Identifier: Apache-2.0
// A FileSystem that calls a function before each call of the inner one. If the function returns an error, the call is
// not made and fails with that error. The function is also called before a file or directory is closed (`call`:
// "close"); its result is ignored then.
//
// For checks and tests: that no lock is held over a call, or that a call waits. Threads: as the inner file system; the
// function runs on the calling thread. The function must outlive all files and directories that were opened.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/file_system.h"

namespace torpor {

// `call`: the name of the method. `name`: the name of the file or directory.
using FileCallCheck = std::function<Status(const char* call, const std::string& name)>;

// `inner` must outlive the result.
std::unique_ptr<FileSystem> make_watched_file_system(FileSystem& inner, FileCallCheck before);

}  // namespace torpor
