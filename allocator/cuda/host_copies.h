// SPDX-License-Identifier: Apache-2.0
// HostCopies: how bytes go between a GPU and host memory: registrations of host memory, and copies by the driver one by
// one; of pinned memory in a batch or, small pieces, by a kernel (allocator/cuda/gather.h).
//
// Owner: CudaDevice, whose context is current in every call. Threads: any; find_batches() and load_gather() before all
// others. Failure: of pin() nothing of `host` is pinned, unless the error says otherwise; of copies some may have
// begun.
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

  // Ask how the device reaches host memory. Return whether copies go in batches: a driver without them, or a device
  // that sees registered memory at other addresses than the host (WSL2), copies one by one.
  Result<bool> find_batches(CUdevice device);
  // After find_batches(). The kernel, for pieces that are shorter on average; `image` empty: this build's. Where it
  // fails, copies go without.
  Status load_gather(int driver_version, std::span<const std::byte> image, uint64_t below_bytes);
  void unload();  // nothing runs any more
  Status begin(CUstream stream, Direction direction, std::span<const Copy> copies, CopyBy by);
  Status pin(std::span<std::byte> host);
  // What is still registered of `host`; a failure leaves the rest to the next call.
  Status unpin(std::span<std::byte> host);

 private:
  Status copy_one(CUstream stream, Direction direction, const Copy& copy);
  Status copy_batch(CUstream stream, Direction direction, std::span<const Copy> copies);
  // Pieces of which each lies in one registration, or in none, and which are pinned.
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
  CUmodule module_ = nullptr;    // with the kernel that gathers; null: there is none
  CUfunction gather_ = nullptr;
  uint64_t gather_below_bytes_ = 0;
  Mutex mutex_;  // never held while the driver is called
  // Each registration of host memory, with its size.
  std::map<std::byte*, uint64_t> pinned_ TORPOR_GUARDED_BY(mutex_);
};

}  // namespace torpor
