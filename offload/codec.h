// SPDX-License-Identifier: Apache-2.0
// Compression of stored bytes. Library: zstd; of bf16 values a codec of our own (bf16_codec.h), ten times as fast.
// Bytes that do not get smaller are stored as they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/status.h"
#include "base/value.h"
#include "offload/chunk.h"

namespace torpor {

std::string_view name(Codec codec);  // "none", "zstd", "bf16"

struct CompressionOptions {
  Codec codec = Codec::kZstd;
  int level = 1;               // zstd's: negative ones are faster, up to 19 smaller
  bool long_distance = false;  // zstd's search for repeats far apart; pays for chunks of several MiB
  Status validate() const;     // kInvalidArgument names the level

  // As users ask for it: a codec by its name, and a level, which is zstd's and alone means zstd. kInvalidArgument for
  // another name, and for a level of another codec.
  static Result<CompressionOptions> of(std::optional<std::string_view> codec, std::optional<int> level);
};

// Most that compression of `bytes` can take.
uint64_t compressed_bound(uint64_t bytes);

// Compresses into `out`, of at least compressed_bound() bytes. The size if it is smaller than 7/8 of `bytes`, otherwise
// no value: store the bytes with Codec::kNone.
std::optional<uint64_t> compress_into(std::span<const std::byte> bytes, std::span<std::byte> out,
                                      const CompressionOptions& options = {});
std::optional<Bytes> compress(std::span<const std::byte> bytes, const CompressionOptions& options = {});

// Bytes in the form in which they are stored: encoded, or as they are.
struct Encoded {
  std::span<const std::byte> bytes;
  Codec codec = Codec::kNone;
};
// Return `bytes` as compress_into() makes them in `room`, or themselves where that does not pay. An empty `room`: there
// is no memory to encode them.
Encoded encode(std::span<const std::byte> bytes, std::span<std::byte> room, const CompressionOptions& options);

// Decodes into exactly `out.size()` bytes, the size that the describing record promised; allocates nothing of the
// input's choosing. kCorruption when the input is damaged or has another size.
Status decompress(Codec codec, std::span<const std::byte> stored, std::span<std::byte> out);

}  // namespace torpor
