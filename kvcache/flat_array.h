// SPDX-License-Identifier: Apache-2.0
// FlatArray: zeroed memory for a fixed number of plain values, in huge pages if the system has them. Pages that were
// never written take no memory. Threads: the owner's.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "base/status.h"
#include "base/units.h"

namespace torpor {

template <class T>
class FlatArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  FlatArray() = default;
  // Map memory for `size` values. kResourceExhausted: the system has none.
  static Result<FlatArray> create(size_t size) {
    FlatArray made;
    if (size == 0) return made;
    made.mapped_ = align_up(size * sizeof(T), kHugePage) + kHugePage;  // the first huge page begins somewhere in it
    void* memory =
        ::mmap(nullptr, made.mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      made.mapped_ = 0;
      return try_catch([&]() -> Result<FlatArray> {
        return Error{.code = Code::kResourceExhausted,
                     .what = "no memory for an index of blocks",
                     .next_step = "give the stores fewer slots"};
      });
    }
    made.memory_ = memory;
    made.size_ = size;
    made.data_ = reinterpret_cast<T*>(align_up(reinterpret_cast<uintptr_t>(memory), kHugePage));
    const size_t whole = size * sizeof(T) / kHugePage * kHugePage;  // the rest would take a huge page for a part of one
    if (whole > 0) (void)::madvise(made.data_, whole, MADV_HUGEPAGE);
    return made;
  }
  ~FlatArray() {
    if (memory_ != nullptr) ::munmap(memory_, mapped_);
  }
  FlatArray(FlatArray&& other) noexcept { swap(other); }
  FlatArray& operator=(FlatArray&& other) noexcept {
    FlatArray taken(std::move(other));
    swap(taken);
    return *this;
  }

  T& operator[](int64_t index) { return data_[index]; }
  const T& operator[](int64_t index) const { return data_[index]; }
  T* data() { return data_; }
  size_t size() const { return size_; }
  size_t bytes() const { return size_ * sizeof(T); }

 private:
  void swap(FlatArray& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(mapped_, other.mapped_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  void* memory_ = nullptr;
  size_t mapped_ = 0;
  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace torpor
