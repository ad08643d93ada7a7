// SPDX-License-Identifier: Apache-2.0
#include "engine/reference/byte_model.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "engine/reference/made_bytes.h"

namespace torpor::reference {

void ByteModel::load_weights(uint64_t seed) { weights_.make(seed, shape_.bf16); }

std::span<std::byte> ByteModel::kv(std::span<const int32_t> table, int32_t at, uint32_t layer) const {
  const KvTensor& tensor = layout_.tensors[layer];
  const auto block = static_cast<uint64_t>(table[static_cast<size_t>(at / shape_.block_tokens)]);
  const uint64_t address = tensor.address + block * tensor.block_stride +
                           static_cast<uint64_t>(at % shape_.block_tokens) * shape_.token_bytes;
  return {reinterpret_cast<std::byte*>(address), shape_.token_bytes};  // NOLINT(performance-no-int-to-ptr)
}

void ByteModel::forward(std::span<const int32_t> table, int32_t at, int32_t token, int64_t pass) {
  for (uint32_t layer = 0; layer < shape_.layers; ++layer) {
    StreamingDigest digest;
    digest.update(std::as_bytes(std::span(prepared_->bytes)));
    weights_.add_first(digest, 64);
    const std::array<int32_t, 2> what{token, static_cast<int32_t>(layer)};
    digest.update(std::as_bytes(std::span(what)));
    digest.update(std::as_bytes(std::span(&pass, 1)));
    if (at > 0) digest.update(kv(table, at - 1, layer));
    const Digest random = digest.finish();
    const std::span<std::byte> place = kv(table, at, layer);
    for (size_t i = 0; i < place.size(); ++i) place[i] = static_cast<std::byte>(random.bytes[i % random.bytes.size()]);
    if (shape_.bf16) make_like_bf16(place);
  }
}

int32_t ByteModel::sample(std::span<const int32_t> table, int32_t length, uint64_t draw) const {
  StreamingDigest digest;
  for (int32_t at = 0; at < length; ++at) {
    for (uint32_t layer = 0; layer < shape_.layers; ++layer) digest.update(kv(table, at, layer));
  }
  digest.update(std::as_bytes(std::span(&draw, 1)));
  const Digest value = digest.finish();
  uint32_t number = 0;
  std::memcpy(&number, value.bytes.data(), sizeof number);
  return static_cast<int32_t>(number % static_cast<uint32_t>(shape_.vocabulary));
}

}  // namespace torpor::reference
