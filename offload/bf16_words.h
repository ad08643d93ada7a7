// SPDX-License-Identifier: Apache-2.0
// The words of a frame of compressed bf16 values (bf16_codec.h), taken apart and put together, by the widest
// instructions that the processor has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace torpor::bf16 {

// By which instructions the words are taken apart and put together: those of all processors, AVX2, or AVX-512 with BW
// and VBMI. The bytes are the same. A processor that has one of them has those before it, too.
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
// `rest`: sign and mantissa.
inline uint16_t word_of(uint8_t rest, uint8_t exponent) {
  return static_cast<uint16_t>((rest & 0x80) << 8 | exponent << 7 | (rest & 0x7f));
}

// Where the parts of one frame go.
struct Parts {
  std::byte* rests;
  std::byte* codes;
  std::byte* escapes;
};

// `count` words of a frame. Moves parts.escapes on; stops at `last_escape`. The bytes do not depend on `instructions`.
void encode(const std::byte* words, size_t count, uint8_t base, Parts& parts, const std::byte* last_escape,
            Instructions instructions);

// The other way; words with an escape come with an exponent of 0.
void decode(const std::byte* rests, const std::byte* codes, size_t count, uint8_t base, std::byte* words,
            Instructions instructions);

}  // namespace torpor::bf16
