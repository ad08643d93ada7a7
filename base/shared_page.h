// SPDX-License-Identifier: Apache-2.0
// SharedPage: a page of a file that several processes map. It begins with a mark that identifies its content. The rest
// is zero at first and consists of atomics, so all processes may use it at any time.
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
  // Make a new file, 0600; the caller removes it.
  static Result<std::unique_ptr<SharedPage>> create(const std::string& path, uint64_t mark);
  // Open and map a file. `what` describes the expected content in error texts. kCorruption: it is no such file.
  // kFailedPrecondition: others than this user can write to it.
  static Result<std::unique_ptr<SharedPage>> open(const std::string& path, uint64_t mark, std::string_view what);
  // Map an open file. `path` is used in error texts only.
  static Result<std::unique_ptr<SharedPage>> open(int file, const std::string& path, uint64_t mark,
                                                  std::string_view what);
  ~SharedPage();
  SharedPage(const SharedPage&) = delete;
  SharedPage& operator=(const SharedPage&) = delete;

  // Return the page as a T: a struct whose first field is the mark.
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
