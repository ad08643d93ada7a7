// SPDX-License-Identifier: Apache-2.0
// TemporaryDirectory: a directory for one test, removed at its end.
#pragma once

#include <string>

#include <unistd.h>

#include <boost/filesystem.hpp>

namespace torpor::test {

// Return a directory in memory, null if there is none: for tests that write much and cut no power, so that the disk's
// speed does not matter.
inline const char* in_memory() { return ::access("/dev/shm", W_OK | X_OK) == 0 ? "/dev/shm" : nullptr; }

class TemporaryDirectory {
 public:
  // `parent` null: the system's directory for temporary files.
  explicit TemporaryDirectory(const char* parent = nullptr)
      : path_((parent != nullptr ? boost::filesystem::path(parent) : boost::filesystem::temp_directory_path()) /
              boost::filesystem::unique_path("torpor-test-%%%%-%%%%-%%%%")) {
    boost::filesystem::create_directories(path_);
    boost::filesystem::permissions(path_, boost::filesystem::owner_all);  // whatever the umask
  }
  ~TemporaryDirectory() {
    boost::system::error_code ignored;
    boost::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  std::string path() const { return path_.string(); }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  boost::filesystem::path path_;
};

}  // namespace torpor::test
