// SPDX-License-Identifier: Apache-2.0
// KvLayout: where the bytes of a KV block lie in device memory.
//
// A KV cache is one or more tensors; in each, layer l of block b is one contiguous piece of `block_bytes` at
// address + l * layer_stride + b * block_stride. That covers layer-outermost (block_stride == block_bytes) and
// block-outermost layouts. All KV groups share the block numbers 0 … num_blocks-1, and may share the bytes: a block
// belongs to one group at a time, so the tensors of different groups may lie over one another, block over same block.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"

namespace torpor {

struct KvTensor {
  uint64_t address = 0;
  uint32_t layers = 0;
  uint64_t layer_stride = 0;  // bytes
  uint64_t block_stride = 0;  // bytes
  uint64_t block_bytes = 0;   // bytes of one block in one layer
  friend bool operator==(const KvTensor&, const KvTensor&) = default;
};

struct KvPiece {
  uint64_t address = 0;
  uint64_t bytes = 0;
};

struct KvLayout {
  uint32_t num_blocks = 0;
  std::vector<KvTensor> tensors;

  uint64_t bytes_per_block() const;  // over all layers of all tensors, as often as they name them
  // Refuses zero sizes, pieces of a tensor that overlap each other, tensors whose pieces lie over those of another
  // block, and sums that wrap (kInvalidArgument, names the tensor).
  Status validate() const;
  // The same bytes, each in one piece only: tensors that lie over others are put together. A layout in which none does
  // comes back as it is. Precondition: validate().
  KvLayout merged() const;
  // The pieces of block `block`, tensor by tensor, layer by layer; neighbours that touch are joined.
  // Precondition: block < num_blocks.
  std::vector<KvPiece> pieces_of(uint32_t block) const;
  friend bool operator==(const KvLayout&, const KvLayout&) = default;
};

}  // namespace torpor
