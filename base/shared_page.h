// SPDX-License-Identifier: Apache-2.0
// SharedPage: a page of a file that several processes map. What lies in it begins with a mark that says what it is; all
// else is zero at first, and made of atomics.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "base/units.h"

namespace torpor {

class SharedPage {
 public:
  // A new file, 0600, that the caller removes.
  static Result<std::unique_ptr<SharedPage>> create(const std::string& path, uint64_t mark);
  // `what` is for people. kCorruption: not such a file; kFailedPrecondition: others than this user can write it.
  static Result<std::unique_ptr<SharedPage>> open(const std::string& path, uint64_t mark, std::string_view what);
  // The same of an open file; `path` is for people.
  static Result<std::unique_ptr<SharedPage>> open(int file, const std::string& path, uint64_t mark,
                                                  std::string_view what);
  ~SharedPage();
  SharedPage(const SharedPage&) = delete;
  SharedPage& operator=(const SharedPage&) = delete;

  // A struct whose first field is the mark.
  template <class T>
  T& as() const {
    static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(T) <= kPage);
    return *static_cast<T*>(memory_);
  }

 private:
  explicit SharedPage(void* memory) : memory_(memory) {}
  static Result<std::unique_ptr<SharedPage>> map(int fd);

  void* const memory_;
};

}  // namespace torpor
