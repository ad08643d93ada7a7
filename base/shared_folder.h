// SPDX-License-Identifier: Apache-2.0
// SharedFolder: a private folder for pages that processes of this machine map (SwapChannel, ProgressFile). It is in
// memory if the system has such a file system. The destructor removes it.
//
// The process holds a lock on the folder while it lives. A killed process leaves its folder behind: the next make() or
// remove_left() removes every folder that is unlocked and has no locked file.
//
// Threads: one at a time.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"

namespace torpor {

class SharedFolder {
 public:
  // Return "/dev/shm" if it is writable, else "/tmp".
  static std::string usual_place();
  // Make a folder in `place`. kUnavailable: other processes removed each folder that was made.
  static Result<std::unique_ptr<SharedFolder>> make(const std::string& place = usual_place());
  // Remove this user's folders in `place` that ended processes have left. A folder that cannot be inspected or removed
  // stays.
  static void remove_left(const std::string& place = usual_place()) noexcept;
  ~SharedFolder();
  void remove() noexcept;  // with all files in it
  const std::string& path() const { return path_; }

 private:
  SharedFolder(std::string path, int folder) : path_(std::move(path)), folder_(folder) {}

  const std::string path_;
  const int folder_;  // descriptor; holds the lock
};

}  // namespace torpor
