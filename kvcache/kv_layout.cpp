#include "kvcache/kv_layout.h"

#include <algorithm>

#include <fmt/format.h>

#include "base/units.h"

namespace torpor {
namespace {

Error bad_tensor(size_t number, std::string what) {
  return Error{.code = Code::kInvalidArgument,
               .what = fmt::format("KV tensor {}: {}", number, what),
               .next_step = "give the layout that the engine allocated"};
}

// True if the pieces of different (layer, block) pairs can touch: one stride must contain the whole run of the other.
bool overlaps(const KvTensor& tensor, uint32_t num_blocks) {
  const uint64_t inner = std::min(tensor.layer_stride, tensor.block_stride);
  const uint64_t outer = std::max(tensor.layer_stride, tensor.block_stride);
  const uint64_t inner_count = tensor.layer_stride <= tensor.block_stride ? tensor.layers : num_blocks;
  if (tensor.layers == 1) return tensor.block_stride < tensor.block_bytes;
  if (num_blocks == 1) return tensor.layer_stride < tensor.block_bytes;
  const std::optional<uint64_t> run = checked_mul(inner, inner_count - 1);
  return inner < tensor.block_bytes || !run || outer < *run + tensor.block_bytes;
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
  }
  return ok();
}

std::vector<KvPiece> KvLayout::pieces_of(uint32_t block) const {
  std::vector<KvPiece> pieces;
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
