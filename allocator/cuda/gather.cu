// SPDX-License-Identifier: Apache-2.0
// nvcc compiles this alone, into an image of the kernel for several GPUs; see gather.h.
#include "allocator/cuda/gather.h"

extern "C" __global__ void __launch_bounds__(torpor::cuda::kGatherThreads)
    torpor_gather(const __grid_constant__ torpor::cuda::GatherArguments arguments) {
  if (blockIdx.x >= arguments.count) return;
  const torpor::cuda::GatherPiece& piece = arguments.pieces[blockIdx.x];
  torpor::cuda::copy_share(reinterpret_cast<unsigned char*>(piece.to),
                           reinterpret_cast<const unsigned char*>(piece.from), piece.bytes, threadIdx.x, blockDim.x);
}
