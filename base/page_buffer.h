// SPDX-License-Identifier: Apache-2.0
// PageBuffer: memory at a multiple of a page, as direct I/O needs it. It grows on demand and then forgets its content.
//
// Large buffers ask for huge pages. A disk splits an operation if its memory is not contiguous, and direct reads of
// some MiB were twice as fast into huge pages as into scattered small ones (tools/dev bench checkpoint).
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>

#include "base/units.h"

namespace torpor {

class PageBuffer {
 public:
  // Return at least `bytes` bytes, a whole number of pages; an empty span if there is no memory.
  std::span<std::byte> room(uint64_t bytes) {
    if (bytes > size_) {
      const uint64_t alignment = bytes >= kHugePage ? kHugePage : kPage;
      size_ = align_up(bytes, alignment);
      memory_.reset(static_cast<std::byte*>(std::aligned_alloc(alignment, size_)));
      if (memory_ == nullptr) size_ = 0;
      if (alignment == kHugePage && memory_ != nullptr) ::madvise(memory_.get(), size_, MADV_HUGEPAGE);  // advice only
    }
    return {memory_.get(), size_};
  }

 private:
  std::unique_ptr<std::byte, void (*)(void*)> memory_{nullptr, std::free};
  uint64_t size_ = 0;
};

}  // namespace torpor
