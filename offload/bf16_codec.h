// SPDX-License-Identifier: Apache-2.0
// Lossless compression of bf16 values to about three quarters of their size, nearly as fast as a copy. Most exponents
// of weights and KV lie close together, so four bits name them. The idea is SplitZip's (arXiv 2605.01708); the format
// is torpor's.
//
// The input is little-endian 16-bit words, in frames of 65,536 words. An odd byte at the end is stored unchanged after
// the last frame. A frame of W words is
//
//   base (u8), 0 (u8), number of escapes E (u16)
//   W bytes: each word's sign and mantissa (its bits 15 and 6 to 0)
//   (W + 1) / 2 bytes: each word's code, four bits: 0 to 13: its exponent is base + code; 14: it is 0; 15: an escape
//   E times: the word's number in its frame (u16), its exponent (u8)
//
// If `base` is 0, the words follow unchanged instead. Codes are packed in groups of 32 words: byte j of a group of n
// words holds the code of word j in its lower half and that of word j + (n + 1) / 2 in its upper half.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/status.h"
#include "offload/bf16_words.h"

namespace torpor::bf16 {

// The largest and the smallest size that `bytes` bytes can compress to.
uint64_t compressed_bound(uint64_t bytes);
constexpr uint64_t least_compressed(uint64_t bytes) { return bytes - bytes / 4; }

// Compress into `out`, which has at least compressed_bound() bytes. Return the compressed size. Return no value if a
// sample of the words or the result shows that less than an eighth is saved (fp8, integers, fp32, noise).
std::optional<uint64_t> compress_into(std::span<const std::byte> bytes, std::span<std::byte> out,
                                      Instructions instructions = fastest_instructions());

// Decode `stored` into exactly `out.size()` bytes. kCorruption if the input is damaged or decodes to another size.
Status decompress(std::span<const std::byte> stored, std::span<std::byte> out,
                  Instructions instructions = fastest_instructions());

}  // namespace torpor::bf16
