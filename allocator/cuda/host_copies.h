// SPDX-License-Identifier: Apache-2.0
// HostCopies: registers (pins) host memory, and copies between it and a GPU. The driver copies pieces one by one;
// pieces of pinned memory go in a batch or, if they are small, by a kernel (allocator/cuda/gather.h).
//
// Owner: CudaDevice; its context is current in every call. Threads: any; call find_batches() and load_gather() before
// all others. Failure: a failed pin() leaves nothing of `host` pinned, unless the error says otherwise; after a failed
// copy some may have begun.
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

  // Ask how the device reaches host memory. Return whether copies go in batches. They go one by one if the driver has
  // no batches, or if the device sees registered memory at other addresses than the host (WSL2).
  Result<bool> find_batches(CUdevice device);
  // Load the kernel, for pieces that are shorter than `below_bytes` on average. Call it after find_batches(). `image`
  // empty: this build's. If it fails, copies work without the kernel.
  Status load_gather(int driver_version, std::span<const std::byte> image, uint64_t below_bytes);
  void unload();  // precondition: nothing runs any more
  Status begin(CUstream stream, Direction direction, std::span<const Copy> copies, CopyBy by);
  Status pin(std::span<std::byte> host);
  // Unregister what is still registered of `host`. After a failure the next call continues with the rest.
  Status unpin(std::span<std::byte> host);

 private:
  Status copy_one(CUstream stream, Direction direction, const Copy& copy);
  Status copy_batch(CUstream stream, Direction direction, std::span<const Copy> copies);
  // Pieces that each lie in one registration or in none, and whether each is pinned.
  struct Divided {
    std::vector<Copy> copies;
    std::vector<bool> pinned;
    uint64_t pinned_copies = 0;
  };
  Divided divided(std::span<const Copy> copies);
  bool gathers(const Divided& pieces) const;
  Status gather(CUstream stream, Direction direction, std::span<const Copy> copies);

  const CudaDriver& driver_;
  const std::string kind_;
  const uint64_t pin_step_bytes_;
  bool same_addresses_ = false;  // the device reaches registered memory at the host's addresses
  CUmodule module_ = nullptr;    // has the kernel; null: there is none
  CUfunction gather_ = nullptr;
  uint64_t gather_below_bytes_ = 0;
  Mutex mutex_;  // never held while the driver is called
  // Start and size of each registration of host memory.
  std::map<std::byte*, uint64_t> pinned_ TORPOR_GUARDED_BY(mutex_);
};

}  // namespace torpor
