// SPDX-License-Identifier: Apache-2.0
// Copies of the checkpoints that are kept in the repository: a clone's file modes depend on its umask.
#pragma once

#include <filesystem>
#include <string>

namespace torpor::test {

// Copy a directory of checkpoints, `name` below tests/golden, to `into`. Return `into`.
inline std::string copy_of_golden(const std::string& name, const std::string& into) {
  namespace fs = std::filesystem;
  fs::create_directories(into);
  fs::copy(fs::path(TORPOR_SOURCE_DIR) / "tests/golden" / name, into, fs::copy_options::recursive);
  fs::permissions(into, fs::perms::owner_all);
  for (const auto& entry : fs::recursive_directory_iterator(into)) {
    fs::permissions(entry.path(),
                    entry.is_directory() ? fs::perms::owner_all : fs::perms::owner_read | fs::perms::owner_write);
  }
  return into;
}

}  // namespace torpor::test
