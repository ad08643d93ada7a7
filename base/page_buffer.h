// PageBuffer: memory at a multiple of a page, as direct I/O wants it, that grows on demand and forgets its content then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>

#include "base/units.h"

namespace torpor {

class PageBuffer {
 public:
  // At least `bytes`, a whole number of pages; empty when there is no memory.
  std::span<std::byte> room(uint64_t bytes) {
    if (bytes > size_) {
      memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kPage, align_up(bytes, kPage))));
      size_ = memory_ == nullptr ? 0 : align_up(bytes, kPage);
    }
    return {memory_.get(), size_};
  }

 private:
  std::unique_ptr<std::byte, void (*)(void*)> memory_{nullptr, std::free};
  uint64_t size_ = 0;
};

}  // namespace torpor
