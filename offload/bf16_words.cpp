// SPDX-License-Identifier: Apache-2.0
#include "offload/bf16_words.h"

#include <algorithm>
#include <array>
#include <bit>

#if defined(__x86_64__)
#include <immintrin.h>
#define TORPOR_AVX2 __attribute__((target("avx2")))
#define TORPOR_AVX512 __attribute__((target("avx512f,avx512bw,avx512vbmi")))
#endif

namespace torpor::bf16 {
namespace {

constexpr size_t kPairWords = 2 * kGroupWords;

uint8_t rest_of(uint16_t word) { return static_cast<uint8_t>((word >> 8 & 0x80) | (word & 0x7f)); }
uint8_t code_of(uint8_t exponent, uint8_t base) {
  const auto distance = static_cast<uint8_t>(exponent - base);
  if (distance < kWindow) return distance;
  return exponent == 0 ? kZeroCode : kEscapeCode;
}

std::byte* put_escape(std::byte* at, size_t word, uint8_t exponent) {
  store_word(at, static_cast<uint16_t>(word));
  at[2] = std::byte{exponent};
  return at + kEscapeBytes;
}

// Encode words `begin` to `end` of a frame; `begin` is a multiple of the group size. Advance parts.escapes; stop at
// `last_escape`.
void encode_plain(const std::byte* words, size_t begin, size_t end, uint8_t base, Parts& parts,
                  const std::byte* last_escape) {
  for (size_t group = begin; group < end; group += kGroupWords) {
    const size_t count = std::min(kGroupWords, end - group);
    const size_t half = (count + 1) / 2;
    std::array<uint8_t, kGroupWords> codes{};
    for (size_t i = 0; i < count; ++i) {
      const uint16_t word = load_word(words + 2 * (group + i));
      parts.rests[group + i] = std::byte{rest_of(word)};
      codes[i] = code_of(exponent_of(word), base);
      if (codes[i] == kEscapeCode && parts.escapes < last_escape)
        parts.escapes = put_escape(parts.escapes, group + i, exponent_of(word));
    }
    for (size_t j = 0; j < half; ++j)
      parts.codes[group / 2 + j] = std::byte{static_cast<uint8_t>(codes[j] | codes[j + half] << 4)};
  }
}

void decode_plain(const std::byte* rests, const std::byte* codes, size_t begin, size_t end, uint8_t base,
                  std::byte* words) {
  for (size_t group = begin; group < end; group += kGroupWords) {
    const size_t count = std::min(kGroupWords, end - group);
    const size_t half = (count + 1) / 2;
    for (size_t i = 0; i < count; ++i) {
      const auto both = std::to_integer<uint8_t>(codes[group / 2 + i % half]);
      const auto code = static_cast<uint8_t>(i < half ? both & 15 : both >> 4);
      const auto exponent = static_cast<uint8_t>(code < kWindow ? base + code : 0);
      store_word(words + 2 * (group + i), word_of(std::to_integer<uint8_t>(rests[group + i]), exponent));
    }
  }
}

#if defined(__x86_64__)

TORPOR_AVX2 __m256i load(const std::byte* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
TORPOR_AVX2 void store(std::byte* at, __m256i value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), value); }

// Encode as encode_plain() does, for whole groups.
TORPOR_AVX2 void encode_avx2(const std::byte* words, size_t end, uint8_t base, Parts& parts,
                             const std::byte* last_escape) {
  const __m256i low_byte = _mm256_set1_epi16(0xff);
  const __m256i sign = _mm256_set1_epi8(static_cast<char>(0x80));
  const __m256i mantissa = _mm256_set1_epi8(0x7f);
  const __m256i one = _mm256_set1_epi8(1);
  const __m256i window = _mm256_set1_epi8(kWindow);
  const __m256i four_bits = _mm256_set1_epi8(15);
  const __m256i bases = _mm256_set1_epi8(static_cast<char>(base));
  for (size_t group = 0; group < end; group += kGroupWords) {
    const __m256i a = load(words + 2 * group);
    const __m256i b = load(words + 2 * group + 32);
    // The bytes of words 0 to 31, first the lower ones; packing leaves their quarters in the order 0, 2, 1, 3.
    const __m256i low = _mm256_permute4x64_epi64(
        _mm256_packus_epi16(_mm256_and_si256(a, low_byte), _mm256_and_si256(b, low_byte)), 0xd8);
    const __m256i high =
        _mm256_permute4x64_epi64(_mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8)), 0xd8);
    store(parts.rests + group, _mm256_or_si256(_mm256_and_si256(high, sign), _mm256_and_si256(low, mantissa)));
    const __m256i exponents =
        _mm256_or_si256(_mm256_add_epi8(high, high), _mm256_and_si256(_mm256_srli_epi16(low, 7), one));
    const __m256i distances = _mm256_sub_epi8(exponents, bases);
    const __m256i outside = _mm256_cmpeq_epi8(_mm256_max_epu8(distances, window), distances);
    const __m256i zero = _mm256_cmpeq_epi8(exponents, _mm256_setzero_si256());  // also in `outside`: no base is 0
    const __m256i codes =
        _mm256_add_epi8(_mm256_and_si256(_mm256_or_si256(distances, outside), four_bits), zero);  // 15 - 1 is kZeroCode
    const __m128i both =
        _mm_or_si128(_mm256_castsi256_si128(codes), _mm_slli_epi16(_mm256_extracti128_si256(codes, 1), 4));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(parts.codes + group / 2), both);
    auto escaped = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_andnot_si256(zero, outside)));
    for (; escaped != 0 && parts.escapes < last_escape; escaped &= escaped - 1) {
      const size_t word = group + static_cast<size_t>(std::countr_zero(escaped));
      parts.escapes = put_escape(parts.escapes, word, exponent_of(load_word(words + 2 * word)));
    }
  }
}

// For each code, the exponent's bits 7 to 1, and bit 0, at their positions in the bytes of a word.
class ExponentTables {
 public:
  explicit ExponentTables(uint8_t base) {
    for (unsigned code = 0; code < kWindow; ++code) {
      uppers_[code] = static_cast<uint8_t>((base + code) >> 1);
      lowers_[code] = static_cast<uint8_t>((base + code) << 7);
    }
  }
  __m128i uppers() const { return _mm_load_si128(reinterpret_cast<const __m128i*>(uppers_.data())); }
  __m128i lowers() const { return _mm_load_si128(reinterpret_cast<const __m128i*>(lowers_.data())); }

 private:
  alignas(16) std::array<uint8_t, 16> uppers_{}, lowers_{};
};

TORPOR_AVX2 void decode_avx2(const std::byte* rests, const std::byte* codes, size_t end, uint8_t base,
                             std::byte* words) {
  const ExponentTables tables(base);
  const __m256i uppers = _mm256_broadcastsi128_si256(tables.uppers());
  const __m256i lowers = _mm256_broadcastsi128_si256(tables.lowers());
  const __m256i sign = _mm256_set1_epi8(static_cast<char>(0x80));
  const __m256i mantissa = _mm256_set1_epi8(0x7f);
  const __m128i four_bits = _mm_set1_epi8(15);
  for (size_t group = 0; group < end; group += kGroupWords) {
    const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + group / 2));
    const __m256i code =
        _mm256_set_m128i(_mm_and_si128(_mm_srli_epi16(both, 4), four_bits), _mm_and_si128(both, four_bits));
    const __m256i rest = load(rests + group);
    const __m256i high = _mm256_or_si256(_mm256_and_si256(rest, sign), _mm256_shuffle_epi8(uppers, code));
    const __m256i low = _mm256_or_si256(_mm256_and_si256(rest, mantissa), _mm256_shuffle_epi8(lowers, code));
    const __m256i high_quarters = _mm256_permute4x64_epi64(high, 0xd8);
    const __m256i low_quarters = _mm256_permute4x64_epi64(low, 0xd8);
    store(words + 2 * group, _mm256_unpacklo_epi8(low_quarters, high_quarters));
    store(words + 2 * group + 32, _mm256_unpackhi_epi8(low_quarters, high_quarters));
  }
}

#pragma GCC diagnostic push
#if !defined(__clang__)
// GCC's own headers leave values undefined on purpose, which it warns of (g++ bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

TORPOR_AVX512 __m512i wide(const std::byte* at) { return _mm512_loadu_si512(at); }

// Return the bytes of `yes` where the mask's bit is set, else those of `no`.
TORPOR_AVX512 __m512i choose(__m512i mask, __m512i yes, __m512i no) {
  return _mm512_ternarylogic_epi64(mask, yes, no, 0xca);
}

// Return the numbers of every second byte of 128, from `first` on.
TORPOR_AVX512 __m512i every_second(unsigned first) {
  alignas(64) std::array<uint8_t, 64> numbers;
  for (unsigned i = 0; i < 64; ++i) numbers[i] = static_cast<uint8_t>(2 * i + first);
  return _mm512_load_si512(numbers.data());
}

// Encode as encode_plain() does, for pairs of groups.
TORPOR_AVX512 void encode_avx512(const std::byte* words, size_t end, uint8_t base, Parts& parts,
                                 const std::byte* last_escape) {
  const __m512i lower = every_second(0);
  const __m512i upper = every_second(1);
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  const __m512i one = _mm512_set1_epi8(1);
  const __m512i window = _mm512_set1_epi8(kWindow);
  const __m512i zero_code = _mm512_set1_epi8(kZeroCode);
  const __m512i escape_code = _mm512_set1_epi8(kEscapeCode);
  const __m512i bases = _mm512_set1_epi8(static_cast<char>(base));
  const __m512i halves = _mm512_setr_epi64(0, 1, 4, 5, 2, 3, 6, 7);  // first the lower codes of both groups
  for (size_t pair = 0; pair < end; pair += kPairWords) {
    const __m512i a = wide(words + 2 * pair);
    const __m512i b = wide(words + 2 * pair + 64);
    const __m512i low = _mm512_permutex2var_epi8(a, lower, b);
    const __m512i high = _mm512_permutex2var_epi8(a, upper, b);
    _mm512_storeu_si512(parts.rests + pair, choose(sign, high, low));
    const __m512i exponents = choose(one, _mm512_srli_epi16(low, 7), _mm512_add_epi8(high, high));
    const __m512i distances = _mm512_sub_epi8(exponents, bases);
    const __mmask64 outside = _mm512_cmpge_epu8_mask(distances, window);
    const __mmask64 zero = _mm512_testn_epi8_mask(exponents, exponents);  // also in `outside`: no base is 0
    const __m512i escapes = _mm512_mask_mov_epi8(distances, outside, escape_code);
    const __m512i codes = _mm512_permutexvar_epi64(halves, _mm512_mask_mov_epi8(escapes, zero, zero_code));
    const __m256i both =
        _mm256_or_si256(_mm512_castsi512_si256(codes), _mm256_slli_epi16(_mm512_extracti64x4_epi64(codes, 1), 4));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(parts.codes + pair / 2), both);
    uint64_t escaped = outside & ~zero;
    for (; escaped != 0 && parts.escapes < last_escape; escaped &= escaped - 1) {
      const size_t word = pair + static_cast<size_t>(std::countr_zero(escaped));
      parts.escapes = put_escape(parts.escapes, word, exponent_of(load_word(words + 2 * word)));
    }
  }
}

TORPOR_AVX512 void decode_avx512(const std::byte* rests, const std::byte* codes, size_t end, uint8_t base,
                                 std::byte* words) {
  const ExponentTables tables(base);
  const __m512i uppers = _mm512_broadcast_i32x4(tables.uppers());
  const __m512i lowers = _mm512_broadcast_i32x4(tables.lowers());
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  const __m256i four_bits = _mm256_set1_epi8(15);
  const __m512i halves = _mm512_setr_epi64(0, 1, 4, 5, 2, 3, 6, 7);
  alignas(64) std::array<uint8_t, 64> numbers;  // indices of bytes of words: lower and upper byte in turn
  for (unsigned i = 0; i < 64; ++i) numbers[i] = static_cast<uint8_t>(i / 2 + i % 2 * 64);
  const __m512i first = _mm512_load_si512(numbers.data());
  const __m512i second = _mm512_add_epi8(first, _mm512_set1_epi8(32));
  for (size_t pair = 0; pair < end; pair += kPairWords) {
    const __m256i both = load(codes + pair / 2);
    const __m512i code = _mm512_permutexvar_epi64(
        halves, _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_and_si256(both, four_bits)),
                                   _mm256_and_si256(_mm256_srli_epi16(both, 4), four_bits), 1));
    const __m512i rest = wide(rests + pair);
    const __m512i high = choose(sign, rest, _mm512_shuffle_epi8(uppers, code));
    const __m512i low = choose(sign, _mm512_shuffle_epi8(lowers, code), rest);
    _mm512_storeu_si512(words + 2 * pair, _mm512_permutex2var_epi8(low, first, high));
    _mm512_storeu_si512(words + 2 * pair + 64, _mm512_permutex2var_epi8(low, second, high));
  }
}

#pragma GCC diagnostic pop

#endif

}  // namespace

void encode(const std::byte* words, size_t count, uint8_t base, Parts& parts, const std::byte* last_escape,
            [[maybe_unused]] Instructions instructions) {
  size_t done = 0;
#if defined(__x86_64__)
  if (instructions == Instructions::kAvx512) {
    done = count / kPairWords * kPairWords;
    encode_avx512(words, done, base, parts, last_escape);
  } else if (instructions == Instructions::kAvx2) {
    done = count / kGroupWords * kGroupWords;
    encode_avx2(words, done, base, parts, last_escape);
  }
#endif
  encode_plain(words, done, count, base, parts, last_escape);
}

void decode(const std::byte* rests, const std::byte* codes, size_t count, uint8_t base, std::byte* words,
            [[maybe_unused]] Instructions instructions) {
  size_t done = 0;
#if defined(__x86_64__)
  if (instructions == Instructions::kAvx512) {
    done = count / kPairWords * kPairWords;
    decode_avx512(rests, codes, done, base, words);
  } else if (instructions == Instructions::kAvx2) {
    done = count / kGroupWords * kGroupWords;
    decode_avx2(rests, codes, done, base, words);
  }
#endif
  decode_plain(rests, codes, done, count, base, words);
}

Instructions fastest_instructions() {
#if defined(__x86_64__)
  static const Instructions fastest = [] {
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vbmi")) return Instructions::kAvx512;
    return __builtin_cpu_supports("avx2") ? Instructions::kAvx2 : Instructions::kPlain;
  }();
  return fastest;
#else
  return Instructions::kPlain;
#endif
}

}  // namespace torpor::bf16
