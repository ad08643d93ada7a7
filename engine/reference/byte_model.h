// SPDX-License-Identifier: Apache-2.0
// ByteModel: not a language model. The next token is a hash over every byte of KV that the request may attend to, and
// the KV of a token is a hash over the weights, the token and the KV of the token before it: one byte that is lost,
// stale or misplaced changes the stream.
//
// Threads: one at a time.
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
  uint32_t token_bytes = 32;  // of KV, a layer; a multiple of 16
  int32_t block_tokens = 4;
  int32_t vocabulary = 32'000;
  bool bf16 = false;  // weights and KV are like values of that type, whose exponents lie close together
};

class ByteModel {
 public:
  // `weights` is device memory; `layout` says where KV blocks are, a tensor for each layer. Both stay valid.
  ByteModel(ByteModelShape shape, ScatteredBytes weights, const KvLayout& layout)
      : shape_(shape), weights_(std::move(weights)), layout_(layout) {}

  void load_weights(uint64_t seed);
  // What is made of the weights and lies outside their regions; a forward pass needs it.
  void prepare() { prepared_ = weights_.digest(); }
  void forget() { prepared_.reset(); }
  bool prepared() const { return prepared_.has_value(); }

  // Writes the KV of the token at position `at` of a sequence whose blocks are `table`.
  // With a `pass` of its own, equal tokens get other KV: as of a model whose last digits depend on the batch.
  void forward(std::span<const int32_t> table, int32_t at, int32_t token, int64_t pass = 0);
  // The next token after `length` tokens, for this draw (0: greedy).
  int32_t sample(std::span<const int32_t> table, int32_t length, uint64_t draw) const;

 private:
  std::span<std::byte> kv(std::span<const int32_t> table, int32_t at, uint32_t layer) const;
  const ByteModelShape shape_;
  const ScatteredBytes weights_;
  const KvLayout& layout_;
  std::optional<Digest> prepared_;
};

}  // namespace torpor::reference
