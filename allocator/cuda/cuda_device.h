// SPDX-License-Identifier: Apache-2.0
// CudaDevice: DeviceMemory on an NVIDIA GPU, over the driver's virtual memory management.
//
// One object a GPU. Works in the device's primary context, the one that torch and the CUDA runtime use; each call makes
// it current and puts back what was. New memory is zeroed when it first gets write access. Copies go through the copy
// engines, many at once in one call where the driver can and the memory is pinned; many small ones, if that is asked
// for, through a kernel. No call breaks a capture of a CUDA graph by another thread (allocator/cuda/context.h).
//
// A wait that fails is decided by the stream: if it is proven empty, the work is over (kDrainedWithError), else nothing
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
  // Memory that other devices on the bus may read and write (GPUDirect RDMA). None: where the device can.
  std::optional<bool> rdma{};
  bool exportable = false;  // memory that can be handed to another process as a file descriptor
  // Copies in one call that are smaller than this on average, all to or from pinned memory, are made by a kernel unless
  // CopyBy says otherwise. 0: by the copy engines like all others. None: kGatherBelowBytes, where the kernel can be
  // had.
  std::optional<uint64_t> gather_below_bytes{};
  // On an H100 the kernel was a fifth faster with pieces of 128 KiB, 4 % slower with 512 KiB (docs/measurements.md).
  static constexpr uint64_t kGatherBelowBytes = uint64_t{256} << 10;
  std::span<const std::byte> gather_image = {};  // of the kernel; empty: the one in this build
  // Host memory is registered in pieces of this size, whole pages: one of much more holds the driver's lock for long,
  // and from 512 GiB on it fails.
  uint64_t pin_step_bytes = uint64_t{1} << 30;
};

struct CudaDeviceInfo {
  std::string name;
  int driver_version = 0;            // 12080 is 12.8
  bool batched_copies = false;       // of pinned memory; else, and of other memory, one by one
  bool gathers = false;              // by the kernel
  std::vector<std::string> notes{};  // what was asked for and is not there
};

// Whether this build knows CUDA at all.
bool built_with_cuda();

// kUnsupported: no driver, no such GPU, a GPU without virtual memory management, or a build without CUDA; says which.
// `info`, if given, is filled.
Result<std::unique_ptr<DeviceMemory>> make_cuda_device(CudaDeviceOptions options = {}, CudaDeviceInfo* info = nullptr);
// The same over a given table, which outlives the result; for tests.
Result<std::unique_ptr<DeviceMemory>> make_cuda_device(const CudaDriver& driver, CudaDeviceOptions options,
                                                       CudaDeviceInfo* info = nullptr);

}  // namespace torpor
