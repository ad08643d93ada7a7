// SPDX-License-Identifier: Apache-2.0
#include "kvcache/kv_layout.h"

#include <algorithm>

#include <fmt/core.h>

#include "base/units.h"

namespace torpor {
namespace {

Error bad_tensor(size_t number, std::string what) {
  return Error{.code = Code::kInvalidArgument,
               .what = fmt::format("KV tensor {}: {}", number, what),
               .next_step = "give the layout that the engine allocated"};
}

// Return true if the pieces of two (layer, block) pairs can overlap: one stride must contain the whole run of the
// other.
bool overlaps(const KvTensor& tensor, uint32_t num_blocks) {
  const uint64_t inner = std::min(tensor.layer_stride, tensor.block_stride);
  const uint64_t outer = std::max(tensor.layer_stride, tensor.block_stride);
  const uint64_t inner_count = tensor.layer_stride <= tensor.block_stride ? tensor.layers : num_blocks;
  if (tensor.layers == 1) return tensor.block_stride < tensor.block_bytes;
  if (num_blocks == 1) return tensor.layer_stride < tensor.block_bytes;
  const std::optional<uint64_t> run = checked_mul(inner, inner_count - 1);
  return inner < tensor.block_bytes || !run || outer < *run + tensor.block_bytes;
}

uint64_t layer_address(const KvTensor& tensor, uint32_t layer) { return tensor.address + layer * tensor.layer_stride; }

// Return the address past the last byte of any block.
uint64_t end_of(const KvTensor& tensor, uint32_t num_blocks) {
  return layer_address(tensor, tensor.layers - 1) + (num_blocks - 1) * tensor.block_stride + tensor.block_bytes;
}

bool apart(const KvTensor& one, const KvTensor& other, uint32_t num_blocks) {
  return end_of(one, num_blocks) <= other.address || end_of(other, num_blocks) <= one.address;
}

bool touch(uint64_t begin, uint64_t bytes, uint64_t other, uint64_t other_bytes) {
  return begin < other + other_bytes && other < begin + bytes;
}

// Return true if a piece of one tensor overlaps a piece of another block of the other. Precondition: both are valid.
bool mixes_blocks(const KvTensor& one, const KvTensor& other, uint32_t num_blocks) {
  if (num_blocks == 1 || apart(one, other, num_blocks)) return false;
  if (one.block_stride != other.block_stride) return true;
  const uint64_t stride = one.block_stride;
  for (uint32_t i = 0; i < one.layers; ++i) {
    for (uint32_t j = 0; j < other.layers; ++j) {
      const bool behind = layer_address(one, i) >= layer_address(other, j);
      const KvTensor& front = behind ? one : other;  // the tensor with the higher address of block 0
      const KvTensor& back = behind ? other : one;
      const uint64_t distance =
          behind ? layer_address(one, i) - layer_address(other, j) : layer_address(other, j) - layer_address(one, i);
      // No piece is longer than the stride: block 0 of `front` can only touch these two blocks of `back`.
      const uint64_t block = distance / stride;
      const uint64_t rest = distance % stride;
      if (block >= 1 && block < num_blocks && rest < back.block_bytes) return true;
      if (block + 1 < num_blocks && stride - rest < front.block_bytes) return true;
    }
  }
  return false;
}

bool shares_bytes(const KvTensor& one, const KvTensor& other) {
  for (uint32_t i = 0; i < one.layers; ++i) {
    for (uint32_t j = 0; j < other.layers; ++j) {
      if (touch(layer_address(one, i), one.block_bytes, layer_address(other, j), other.block_bytes)) return true;
    }
  }
  return false;
}

}  // namespace

uint64_t KvLayout::bytes_per_block() const {
  uint64_t sum = 0;
  for (const KvTensor& tensor : tensors) sum += tensor.block_bytes * tensor.layers;
  return sum;
}

Status KvLayout::validate() const {
  if (num_blocks == 0 || tensors.empty()) {
    return Error{.code = Code::kInvalidArgument,
                 .what = "the KV layout has no blocks or no tensors",
                 .next_step = "give the engine's layout"};
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    const KvTensor& tensor = tensors[i];
    if (tensor.address == 0 || tensor.layers == 0 || tensor.block_bytes == 0)
      return bad_tensor(i, "an address, a count or a size is 0");
    const std::optional<uint64_t> layers = checked_mul(tensor.layer_stride, tensor.layers);
    const std::optional<uint64_t> blocks = checked_mul(tensor.block_stride, num_blocks);
    if (!layers || !blocks || !checked_add(*layers, *blocks) || !checked_add(tensor.address, *layers + *blocks)) {
      return bad_tensor(i, "its sizes are too large");
    }
    if (overlaps(tensor, num_blocks)) return bad_tensor(i, "its pieces overlap");
    for (size_t before = 0; before < i; ++before) {
      if (mixes_blocks(tensors[before], tensor, num_blocks))
        return bad_tensor(i, fmt::format("its blocks lie over other blocks of tensor {}", before));
    }
  }
  return ok();
}

KvLayout KvLayout::merged() const {
  KvLayout merged{.num_blocks = num_blocks, .tensors = {}};
  std::vector<KvTensor> shared;  // one layer each
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto over = [&](const KvTensor& other) { return &other != &tensors[i] && shares_bytes(tensors[i], other); };
    if (std::none_of(tensors.begin(), tensors.end(), over)) {
      merged.tensors.push_back(tensors[i]);
      continue;
    }
    for (uint32_t layer = 0; layer < tensors[i].layers; ++layer) {
      KvTensor single = tensors[i];
      single.address = layer_address(tensors[i], layer);
      single.layers = 1;
      single.layer_stride = single.block_bytes;
      shared.push_back(single);
    }
  }
  std::sort(shared.begin(), shared.end(), [](const KvTensor& a, const KvTensor& b) { return a.address < b.address; });
  for (const KvTensor& single : shared) {
    KvTensor* last = merged.tensors.empty() ? nullptr : &merged.tensors.back();
    if (&single != &shared.front() && single.address < last->address + last->block_bytes) {
      const uint64_t end = std::max(last->address + last->block_bytes, single.address + single.block_bytes);
      last->block_bytes = last->layer_stride = end - last->address;
    } else {
      merged.tensors.push_back(single);
    }
  }
  return merged;
}

std::vector<DevicePiece> KvLayout::pieces_of(uint32_t block) const {
  std::vector<DevicePiece> pieces;
  for (const KvTensor& tensor : tensors) {
    for (uint32_t layer = 0; layer < tensor.layers; ++layer) {
      const uint64_t address = tensor.address + layer * tensor.layer_stride + block * tensor.block_stride;
      if (!pieces.empty() && pieces.back().address + pieces.back().bytes == address) {
        pieces.back().bytes += tensor.block_bytes;
      } else {
        pieces.push_back({address, tensor.block_bytes});
      }
    }
  }
  return pieces;
}

}  // namespace torpor
