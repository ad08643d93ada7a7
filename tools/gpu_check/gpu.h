// SPDX-License-Identifier: Apache-2.0
// A GPU as a check uses it beside torpor: the driver's own calls, each waited for.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "allocator/cuda/driver.h"
#include "base/status.h"

namespace torpor::gpu_check {

// A failure ends its check, and no other.
template <class T>
T must(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().to_string());
  return std::move(*result);
}
inline void must(const Status& status) {
  if (!status) throw std::runtime_error(status.error().to_string());
}

// The device's context, current in this thread, and a stream.
class Gpu {
 public:
  Gpu(const CudaDriver& driver, int ordinal) : driver_(driver) {
    check(driver.cuDeviceGet(&device_, ordinal), "cuDeviceGet");
    check(driver.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
    check(driver.cuCtxPushCurrent(context_), "cuCtxPushCurrent");
    check(driver.cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  }
  ~Gpu() {
    CUcontext popped = nullptr;
    driver_.cuStreamDestroy(stream_);
    driver_.cuCtxPopCurrent(&popped);
    driver_.cuDevicePrimaryCtxRelease(device_);
  }
  void check(CUresult result, const char* what) const {
    if (result != CUDA_SUCCESS) must(Status(cuda_error(driver_, result, what)));
  }
  void wait() const { check(driver_.cuStreamSynchronize(stream_), "cuStreamSynchronize"); }
  void down(void* host, CUdeviceptr device, uint64_t bytes) const {
    check(driver_.cuMemcpyDtoHAsync(host, device, bytes, stream_), "cuMemcpyDtoHAsync");
    wait();
  }
  void up(CUdeviceptr device, const void* host, uint64_t bytes) const {
    check(driver_.cuMemcpyHtoDAsync(device, host, bytes, stream_), "cuMemcpyHtoDAsync");
    wait();
  }
  void set(CUdeviceptr device, unsigned char value, uint64_t bytes) const {
    check(driver_.cuMemsetD8Async(device, value, bytes, stream_), "cuMemsetD8Async");
    wait();
  }
  uint64_t used() const {
    size_t free = 0, total = 0;
    check(driver_.cuMemGetInfo(&free, &total), "cuMemGetInfo");
    return total - free;
  }
  CUstream stream() const { return stream_; }
  const CudaDriver& driver() const { return driver_; }
  CUdevice device() const { return device_; }

 private:
  const CudaDriver& driver_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
};

}  // namespace torpor::gpu_check
