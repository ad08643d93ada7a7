// SPDX-License-Identifier: Apache-2.0
// CudaDriver: the functions of NVIDIA's driver that torpor calls, as a plain table.
//
// cuda_driver() fills the table at run time from libcuda.so.1, so one binary runs with and without a GPU; nothing of
// CUDA is linked. Tests use a table of their own: tests/support/fake_cuda_driver.h.
//
// Include this only if cuda.h was found at build time; allocator/cuda/cuda_device.h works in any build.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include "base/status.h"

#if CUDA_VERSION < 12080
#error "torpor needs the headers of CUDA 12.8 or newer"
#endif

namespace torpor {

// Each function with the CUDA version of its signature. All are in drivers for CUDA 11.4 and newer.
#define TORPOR_CUDA_FUNCTIONS(F)              \
  F(cuInit, 2000)                             \
  F(cuDriverGetVersion, 2020)                 \
  F(cuGetErrorName, 6000)                     \
  F(cuGetErrorString, 6000)                   \
  F(cuDeviceGetCount, 2000)                   \
  F(cuDeviceGet, 2000)                        \
  F(cuDeviceGetName, 2000)                    \
  F(cuDeviceGetAttribute, 2000)               \
  F(cuDevicePrimaryCtxRetain, 7000)           \
  F(cuDevicePrimaryCtxRelease, 11000)         \
  F(cuCtxPushCurrent, 4000)                   \
  F(cuCtxPopCurrent, 4000)                    \
  F(cuCtxSynchronize, 2000)                   \
  F(cuThreadExchangeStreamCaptureMode, 10010) \
  F(cuMemGetInfo, 3020)                       \
  F(cuMemGetAllocationGranularity, 10020)     \
  F(cuMemAddressReserve, 10020)               \
  F(cuMemAddressFree, 10020)                  \
  F(cuMemCreate, 10020)                       \
  F(cuMemRelease, 10020)                      \
  F(cuMemMap, 10020)                          \
  F(cuMemUnmap, 10020)                        \
  F(cuMemSetAccess, 10020)                    \
  F(cuMemHostRegister, 6050)                  \
  F(cuMemHostUnregister, 4000)                \
  F(cuMemsetD8Async, 3020)                    \
  F(cuMemcpyDtoHAsync, 3020)                  \
  F(cuMemcpyHtoDAsync, 3020)                  \
  F(cuMemcpyDtoDAsync, 3020)                  \
  F(cuModuleLoadData, 2000)                   \
  F(cuModuleGetFunction, 2000)                \
  F(cuModuleUnload, 2000)                     \
  F(cuLaunchKernel, 4000)                     \
  F(cuStreamCreate, 2000)                     \
  F(cuStreamDestroy, 4000)                    \
  F(cuStreamSynchronize, 2000)                \
  F(cuEventCreate, 2000)                      \
  F(cuEventRecord, 2000)                      \
  F(cuEventSynchronize, 2000)                 \
  F(cuEventDestroy, 4000)

// Functions that newer drivers have; without them torpor uses slower ones.
#define TORPOR_CUDA_OPTIONAL_FUNCTIONS(F) F(cuMemcpyBatchAsync, 12080)

struct CudaDriver {
#define TORPOR_CUDA_MEMBER(function, version) PFN_##function##_v##version function = nullptr;
  TORPOR_CUDA_FUNCTIONS(TORPOR_CUDA_MEMBER)
  TORPOR_CUDA_OPTIONAL_FUNCTIONS(TORPOR_CUDA_MEMBER)
#undef TORPOR_CUDA_MEMBER
};

// Return the table of libcuda.so.1, initialised. It is loaded once and lives for the whole process. kUnsupported: the
// error says what is missing: the library, a function (an old driver), or a device.
Result<const CudaDriver*> cuda_driver();

// Look up another function of the library with the driver's own look-up; null if there is none.
void* cuda_function(const char* name, int version);

// Return the error of a driver call; `doing` says what was tried. Out of memory: kResourceExhausted; a call that is
// refused during a capture: kUnavailable; any other: kDevice.
Error cuda_error(const CudaDriver& driver, CUresult result, std::string_view doing);

}  // namespace torpor
