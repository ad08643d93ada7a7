// SPDX-License-Identifier: Apache-2.0
// CudaDevice: DeviceMemory on an NVIDIA GPU, over the driver's virtual memory management.
//
// One object per GPU. It works in the device's primary context, which torch and the CUDA runtime use; each call makes
// it current and then restores the previous one. New memory is zeroed when it first gets write access. Copies use the
// copy engines, many in one call if the driver can and the memory is pinned; many small ones use a kernel if that is
// requested. No call breaks a capture of a CUDA graph by another thread (allocator/cuda/context.h).
//
// If a wait fails, the stream decides: if the stream is proven empty the work is over (kDrainedWithError), else nothing
// is known (kUnproven).
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "allocator/device_memory.h"

namespace torpor {

struct CudaDriver;

struct CudaDeviceOptions {
  int ordinal = 0;
  // Memory that other devices on the bus may read and write (GPUDirect RDMA). None: if the device can.
  std::optional<bool> rdma{};
  bool exportable = false;  // memory that another process can get as a file descriptor
  // If the copies of one call are smaller than this on average and all use pinned memory, a kernel makes them, unless
  // CopyBy says otherwise. 0: always use the copy engines. None: kGatherBelowBytes if the kernel is available.
  std::optional<uint64_t> gather_below_bytes{};
  // On an H100 the kernel was a fifth faster with pieces of 128 KiB and 4 % slower with 512 KiB (docs/measurements.md).
  static constexpr uint64_t kGatherBelowBytes = uint64_t{256} << 10;
  std::span<const std::byte> gather_image = {};  // image of the kernel; empty: the one in this build
  // Host memory is registered in pieces of this size, whole pages. A much larger piece holds the driver's lock for
  // long, and from 512 GiB on it fails.
  uint64_t pin_step_bytes = uint64_t{1} << 30;
};

struct CudaDeviceInfo {
  std::string name;
  int driver_version = 0;            // 12080 is 12.8
  bool batched_copies = false;       // for pinned memory; other memory, and all if false, is copied one by one
  bool gathers = false;              // copies by the kernel
  std::vector<std::string> notes{};  // requested features that are not there
};

// Return whether this build has CUDA.
bool built_with_cuda();

// Make the device and fill `info`, if given. kUnsupported: no driver, no such GPU, a GPU without virtual memory
// management, or a build without CUDA; the error says which.
Result<std::unique_ptr<DeviceMemory>> make_cuda_device(CudaDeviceOptions options = {}, CudaDeviceInfo* info = nullptr);
// Make the device over a given table, which must outlive the result. For tests.
Result<std::unique_ptr<DeviceMemory>> make_cuda_device(const CudaDriver& driver, CudaDeviceOptions options,
                                                       CudaDeviceInfo* info = nullptr);

}  // namespace torpor
