// SPDX-License-Identifier: Apache-2.0
// Replaces cuda_device.cpp in a build without cuda.h.
#include "allocator/cuda/cuda_device.h"

namespace torpor {

bool built_with_cuda() { return false; }

Result<std::unique_ptr<DeviceMemory>> make_cuda_device(CudaDeviceOptions, CudaDeviceInfo*) {
  return Error{.code = Code::kUnsupported,
               .what = "this torpor was built without CUDA: cuda.h was not found",
               .next_step = "install the CUDA Toolkit or pip install nvidia-cuda-runtime, and build again",
               .origin = Origin::kDevice};
}

}  // namespace torpor
