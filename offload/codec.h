// SPDX-License-Identifier: Apache-2.0
// Compression of stored bytes: zstd, or torpor's codec for bf16 values (bf16_codec.h), which is ten times as fast.
// Bytes that do not get smaller are stored unchanged.
//
// Threads: all functions from any thread.
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
  int level = 1;               // zstd only: negative levels are faster, levels up to 19 compress more
  bool long_distance = false;  // zstd only: finds distant repeats; pays for chunks of several MiB
  Status validate() const;     // kInvalidArgument names the level

  // Return the options for a codec's name and a level, as users write them. A level without a codec means zstd.
  // kInvalidArgument for an unknown codec, and for a level with a codec other than zstd.
  static Result<CompressionOptions> of(std::optional<std::string_view> codec, std::optional<int> level);
};

// Return the largest size that `bytes` bytes can compress to.
uint64_t compressed_bound(uint64_t bytes);

// Compress into `out`, which has at least compressed_bound() bytes. Return the size if it is less than 7/8 of `bytes`;
// else no value: store the bytes with Codec::kNone.
std::optional<uint64_t> compress_into(std::span<const std::byte> bytes, std::span<std::byte> out,
                                      const CompressionOptions& options = {});
std::optional<Bytes> compress(std::span<const std::byte> bytes, const CompressionOptions& options = {});

// Bytes in their stored form: compressed, or unchanged.
struct Encoded {
  std::span<const std::byte> bytes;
  Codec codec = Codec::kNone;
};
// Return `bytes` compressed into `room`, or `bytes` themselves if compression does not pay or `room` is empty (there
// was no memory for it).
Encoded encode(std::span<const std::byte> bytes, std::span<std::byte> room, const CompressionOptions& options);

// Decode `stored` into exactly `out.size()` bytes, the size that the record promised. The input cannot make it allocate
// memory. kCorruption if the input is damaged or decodes to another size.
Status decompress(Codec codec, std::span<const std::byte> stored, std::span<std::byte> out);

}  // namespace torpor
