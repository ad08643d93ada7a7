// HostCopies: how bytes go between a GPU and host memory: registrations of host memory, and copies by the driver one by
// one, in a batch, or, small pieces in pinned memory, by a kernel (allocator/cuda/gather.h).
//
// The device's context is current in every call. Threads: any.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "allocator/cuda/driver.h"
#include "allocator/device_memory.h"
#include "base/mutex.h"

namespace torpor {

class HostCopies {
 public:
  HostCopies(const CudaDriver& driver, std::string kind, uint64_t pin_step_bytes)
      : driver_(driver), kind_(std::move(kind)), pin_step_bytes_(pin_step_bytes) {}

  // The kernel, for pieces that are shorter on average; `image` empty: this build's. Where it fails, copies go without.
  Status load_gather(CUdevice device, int driver_version, std::span<const std::byte> image, uint64_t below_bytes);
  void unload();  // nothing runs any more
  Status begin(CUstream stream, Direction direction, std::span<const Copy> copies);
  Status pin(std::span<std::byte> host);
  // What is still registered of `host`; a failure leaves the rest to the next call.
  Status unpin(std::span<std::byte> host);

 private:
  Status copy_batch(CUstream stream, Direction direction, std::span<const Copy> copies);
  std::vector<Copy> divided(std::span<const Copy> copies);
  bool gathers(std::span<const Copy> copies);
  Status gather(CUstream stream, Direction direction, std::span<const Copy> copies);

  const CudaDriver& driver_;
  const std::string kind_;
  const uint64_t pin_step_bytes_;
  CUmodule module_ = nullptr;  // with the kernel that gathers; null: there is none
  CUfunction gather_ = nullptr;
  uint64_t gather_below_bytes_ = 0;
  Mutex mutex_;  // never held while the driver is called
  // Each registration of host memory, with its size.
  std::map<std::byte*, uint64_t> pinned_ TORPOR_GUARDED_BY(mutex_);
};

}  // namespace torpor
