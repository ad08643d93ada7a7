// SPDX-License-Identifier: Apache-2.0
// KvLayout: where the bytes of a KV block lie in device memory. A value.
//
// A KV cache is one or more tensors. In each, layer l of block b is one contiguous piece of `block_bytes` bytes at
// address + l * layer_stride + b * block_stride. This covers layouts with the layer outermost (block_stride ==
// block_bytes) and with the block outermost. All KV groups share the block numbers 0 … num_blocks-1, and may share
// bytes: a block belongs to one group at a time, so tensors of different groups may overlap if each block overlaps only
// the same block.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "offload/chunk.h"

namespace torpor {

struct KvTensor {
  uint64_t address = 0;
  uint32_t layers = 0;
  uint64_t layer_stride = 0;  // bytes
  uint64_t block_stride = 0;  // bytes
  uint64_t block_bytes = 0;   // bytes of one block in one layer
  friend bool operator==(const KvTensor&, const KvTensor&) = default;
};

struct KvLayout {
  uint32_t num_blocks = 0;
  std::vector<KvTensor> tensors;

  uint64_t bytes_per_block() const;  // over all tensors; shared bytes count once for each tensor
  // Check the layout. kInvalidArgument names the tensor: a size is zero, its pieces overlap each other, it overlaps a
  // tensor at another block, or a sum overflows.
  Status validate() const;
  // Return a layout of the same bytes in which each byte is in one piece only: overlapping tensors are merged. A layout
  // without overlaps is returned unchanged. Precondition: validate() is ok.
  KvLayout merged() const;
  // Return the pieces of a block, tensor by tensor and layer by layer; adjacent pieces are joined. Precondition: block
  // < num_blocks.
  std::vector<DevicePiece> pieces_of(uint32_t block) const;
  friend bool operator==(const KvLayout&, const KvLayout&) = default;
};

}  // namespace torpor
