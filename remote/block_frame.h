// SPDX-License-Identifier: Apache-2.0
// What a KV block is in a remote store: its key there, and the 160 bytes in front of its own that say what it is.
// Whoever wrote them: nothing is believed before it fits (remote/FORMAT.md). Values and pure functions.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>

#include "base/digest.h"
#include "base/seal.h"
#include "base/status.h"
#include "offload/block_key.h"
#include "offload/codec.h"

namespace torpor::remote {

struct BlockFrame {
  std::array<uint8_t, 32> hash{};
  uint32_t group = 0;
  int32_t rank = 0;
  Digest space;        // of the namespace
  uint64_t bytes = 0;  // before encoding
  uint64_t stored = 0;
  Digest digest;  // of the bytes before encoding
  Codec codec = Codec::kNone;
  Protection protection = Protection::kNone;
  SealId seal_id{};  // zero without a key
  uint64_t seal_number = 0;
  SealTag seal{};
  friend bool operator==(const BlockFrame&, const BlockFrame&) = default;
};

inline constexpr size_t kFrameBytes = 160;
using FrameBytes = std::array<std::byte, kFrameBytes>;

FrameBytes encode_frame(const BlockFrame& frame);
// kCorruption: it is none. kIncompatible: of another version.
Result<BlockFrame> decode_frame(std::span<const std::byte, kFrameBytes> bytes);
// Of the encoded frame, what a seal binds beside the bytes: all that says what they are.
std::string_view sealed_part(const FrameBytes& bytes);

// "NAME:kv1:SPACE:rRANK:gGROUP:HASH"; `name` may be empty. No braces: a cluster spreads the blocks over its nodes.
std::string block_key_text(std::string_view name, const Digest& space, int32_t rank, const BlockKey& key);
// Whether a name may begin keys: letters, digits, '.', '_' and '-', not more than 64.
bool may_begin_keys(std::string_view name);

}  // namespace torpor::remote
