// SPDX-License-Identifier: Apache-2.0
#include "bindings/module_files.h"

#include <cstdlib>
#include <string_view>

#include <fmt/core.h>
#include <pybind11/pybind11.h>

#include "base/log.h"
#include "base/watched_file_system.h"

namespace torpor {
namespace {

bool checked() {
  static const bool wanted = std::getenv("TORPOR_CHECK_FILE_CALLS") != nullptr;
  return wanted;
}

}  // namespace

Status check_file_call(const char* call, const std::string& name) {
  if (!checked() || Py_IsInitialized() == 0 || PyGILState_Check() == 0) return ok();
  if (std::string_view(call) == "close") {  // no caller looks at its result
    log().critical("{} is closed while the interpreter's lock is held", name);
    std::abort();
  }
  return Error{.code = Code::kInternal,
               .what = fmt::format("{} of {} while the interpreter's lock is held", call, name),
               .next_step = "release it in the binding"};
}

FileSystem& module_files() {
  if (!checked()) return linux_file_system();
  static const std::unique_ptr<FileSystem> watched = make_watched_file_system(linux_file_system(), check_file_call);
  return *watched;
}

}  // namespace torpor
