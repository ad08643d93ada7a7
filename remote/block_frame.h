// SPDX-License-Identifier: Apache-2.0
// BlockFrame: the 160 bytes in front of a KV block in a remote store, which describe it; and the block's key there.
// Anybody may have written them, so all fields are checked before use (remote/FORMAT.md). Values and pure functions.
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
  Digest space;         // digest of the namespace
  uint64_t bytes = 0;   // before encoding
  uint64_t stored = 0;  // bytes after encoding
  Digest digest;        // of the bytes before encoding
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
// Decode and check a frame. kCorruption: it is not a frame. kIncompatible: it has another version.
Result<BlockFrame> decode_frame(std::span<const std::byte, kFrameBytes> bytes);
// Return the part of an encoded frame that the seal binds in addition to the block's bytes: everything that describes
// them.
std::string_view sealed_part(const FrameBytes& bytes);

// Return "NAME:kv1:SPACE:rRANK:gGROUP:HASH"; `name` may be empty. The key has no braces, so a cluster spreads the
// blocks over its nodes.
std::string block_key_text(std::string_view name, const Digest& space, int32_t rank, const BlockKey& key);
// Return whether keys may begin with `name`: letters, digits, '.', '_' and '-', at most 64.
bool may_begin_keys(std::string_view name);

}  // namespace torpor::remote
