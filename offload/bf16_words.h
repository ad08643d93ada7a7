// SPDX-License-Identifier: Apache-2.0
// Encoding and decoding the words of one frame of compressed bf16 values (bf16_codec.h), with the widest instructions
// that the processor has. Pure functions, thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace torpor::bf16 {

// The instruction set to use: baseline, AVX2, or AVX-512 with BW and VBMI. A processor that has one has all those
// before it. The result does not depend on the choice.
enum class Instructions : uint8_t { kPlain, kAvx2, kAvx512 };
Instructions fastest_instructions();  // of this processor

inline constexpr size_t kGroupWords = 32;
inline constexpr size_t kEscapeBytes = 3;
inline constexpr unsigned kWindow = 14;  // exponents with a code of their own
inline constexpr uint8_t kZeroCode = 14;
inline constexpr uint8_t kEscapeCode = 15;

inline uint16_t load_word(const std::byte* at) {
  uint16_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}
inline void store_word(std::byte* at, uint16_t word) { std::memcpy(at, &word, sizeof word); }
inline uint8_t exponent_of(uint16_t word) { return static_cast<uint8_t>(word >> 7); }
// Return the word with this sign and mantissa (`rest`) and `exponent`.
inline uint16_t word_of(uint8_t rest, uint8_t exponent) {
  return static_cast<uint16_t>((rest & 0x80) << 8 | exponent << 7 | (rest & 0x7f));
}

// The output positions of the parts of one frame.
struct Parts {
  std::byte* rests;
  std::byte* codes;
  std::byte* escapes;
};

// Encode `count` words of a frame. Advance parts.escapes; stop if it reaches `last_escape`.
void encode(const std::byte* words, size_t count, uint8_t base, Parts& parts, const std::byte* last_escape,
            Instructions instructions);

// Decode `count` words. A word whose code is an escape gets an exponent of 0.
void decode(const std::byte* rests, const std::byte* codes, size_t count, uint8_t base, std::byte* words,
            Instructions instructions);

}  // namespace torpor::bf16
