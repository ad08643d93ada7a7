// SPDX-License-Identifier: Apache-2.0
// ByteModel: not a language model. The next token is a hash over every byte of KV that the request may attend to. The
// KV of a token is a hash over the weights, the token and the KV of the token before. One byte that is lost, stale or
// misplaced changes the stream.
//
// Owner: ReferenceEngine. Threads: one at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "base/digest.h"
#include "engine/reference/scattered_regions.h"
#include "kvcache/kv_layout.h"

namespace torpor::reference {

struct ByteModelShape {
  uint32_t layers = 2;
  uint32_t token_bytes = 32;  // bytes of KV in one layer; a multiple of 16
  int32_t block_tokens = 4;
  int32_t vocabulary = 32'000;
  bool bf16 = false;  // weights and KV look like bf16 values, whose exponents lie close together
};

class ByteModel {
 public:
  // `weights`: device memory. `layout`: where KV blocks lie, with one tensor for each layer. Both stay valid.
  ByteModel(ByteModelShape shape, ScatteredBytes weights, const KvLayout& layout)
      : shape_(shape), weights_(std::move(weights)), layout_(layout) {}

  void load_weights(uint64_t seed);
  // Compute what a forward pass derives from the weights; it lies outside their regions.
  void prepare() { prepared_ = weights_.digest(); }
  void forget() { prepared_.reset(); }
  bool prepared() const { return prepared_.has_value(); }

  // Write the KV of the token at position `at` of a sequence whose blocks are `table`. Another `pass` gives equal
  // tokens other KV, as in a model whose last digits depend on the batch.
  void forward(std::span<const int32_t> table, int32_t at, int32_t token, int64_t pass = 0);
  // Return the next token after `length` tokens. `draw`: random number of the sample; 0: greedy.
  int32_t sample(std::span<const int32_t> table, int32_t length, uint64_t draw) const;

 private:
  std::span<std::byte> kv(std::span<const int32_t> table, int32_t at, uint32_t layer) const;
  const ByteModelShape shape_;
  const ScatteredBytes weights_;
  const KvLayout& layout_;
  std::optional<Digest> prepared_;
};

}  // namespace torpor::reference
