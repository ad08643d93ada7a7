// SPDX-License-Identifier: Apache-2.0
#include "allocator/cuda/gather.h"

#ifdef TORPOR_GATHER_IMAGE
// The file that nvcc made, unchanged.
asm(".pushsection .rodata\n"
    ".balign 16\n"
    "torpor_gather_image_begin: .incbin \"" TORPOR_GATHER_IMAGE
    "\"\n"
    "torpor_gather_image_end:\n"
    ".popsection\n");
extern "C" const std::byte torpor_gather_image_begin[];
extern "C" const std::byte torpor_gather_image_end[];
#endif

namespace torpor::cuda {

std::span<const std::byte> gather_image() {
#ifdef TORPOR_GATHER_IMAGE
  return {torpor_gather_image_begin, torpor_gather_image_end};
#else
  return {};
#endif
}

}  // namespace torpor::cuda
