// SPDX-License-Identifier: Apache-2.0
// Lossless compression of bf16 values to about three quarters, nearly as fast as a copy: most exponents of weights and
// of KV lie close together, so four bits name them. The idea: SplitZip (arXiv 2605.01708); the format is of this
// project.
//
// The values are taken as little-endian 16-bit words, in frames of 65,536; an odd byte at the end follows as it is. A
// frame is
//
//   base (u8), 0 (u8), number of escapes E (u16)
//   W bytes: each word's sign and mantissa (its bits 15 and 6 to 0)
//   (W + 1) / 2 bytes: each word's code, four bits: 0 to 13: its exponent is base + code; 14: it is 0; 15: an escape
//   E times: the word's number in its frame (u16), its exponent (u8)
//
// or, with a base of 0, the words as they are. In codes, words go in groups of 32: byte j of a group of n words holds
// word j in its lower half and word j + (n + 1) / 2 in its upper one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/status.h"
#include "offload/bf16_words.h"

namespace torpor::bf16 {

// Most and least that compression of `bytes` can take.
uint64_t compressed_bound(uint64_t bytes);
constexpr uint64_t least_compressed(uint64_t bytes) { return bytes - bytes / 4; }

// Compresses into `out`, of at least compressed_bound() bytes. The size, or no value where a sample of the words, or
// the result, says that less than an eighth is saved: fp8, integers, fp32, noise.
std::optional<uint64_t> compress_into(std::span<const std::byte> bytes, std::span<std::byte> out,
                                      Instructions instructions = fastest_instructions());

// Decodes into exactly `out.size()` bytes. kCorruption when the input is damaged or has another size.
Status decompress(std::span<const std::byte> stored, std::span<std::byte> out,
                  Instructions instructions = fastest_instructions());

}  // namespace torpor::bf16
