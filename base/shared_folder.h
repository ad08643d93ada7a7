// SPDX-License-Identifier: Apache-2.0
// SharedFolder: a folder of its own for pages that processes of this machine map (SwapChannel, ProgressFile), in memory
// where the system has such a place. It goes with this object.
//
// Its process holds a lock on it as long as it lives. What a killed one left goes when the next folder is made, or at
// remove_left(): whatever nobody holds a lock on, nor on a file in it.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"

namespace torpor {

class SharedFolder {
 public:
  static std::string usual_place();
  static Result<std::unique_ptr<SharedFolder>> make(const std::string& place = usual_place());
  // Of this user, in that place. What cannot be looked at, or removed, stays.
  static void remove_left(const std::string& place = usual_place()) noexcept;
  ~SharedFolder();
  void remove() noexcept;  // with all that is in it
  const std::string& path() const { return path_; }

 private:
  SharedFolder(std::string path, int folder) : path_(std::move(path)), folder_(folder) {}

  const std::string path_;
  const int folder_;  // with the lock
};

}  // namespace torpor
