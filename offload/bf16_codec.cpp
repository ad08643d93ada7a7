#include "offload/bf16_codec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include <fmt/core.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define TORPOR_AVX2 __attribute__((target("avx2")))
#endif

namespace torpor::bf16 {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr size_t kFrameWords = 65'536;  // a word's number fits 16 bits
constexpr size_t kGroupWords = 32;
constexpr size_t kHeaderBytes = 4;
constexpr size_t kEscapeBytes = 3;
constexpr unsigned kWindow = 14;  // exponents with a code of their own
constexpr uint8_t kZeroCode = 14;
constexpr uint8_t kEscapeCode = 15;
constexpr unsigned kLastBase = 256 - kWindow;
constexpr size_t kSampledWords = 256;  // of a frame
constexpr size_t kSampledFrames = 8;   // of all

uint16_t load_word(const std::byte* at) {
  uint16_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}
void store_word(std::byte* at, uint16_t word) { std::memcpy(at, &word, sizeof word); }

uint8_t exponent_of(uint16_t word) { return static_cast<uint8_t>(word >> 7); }
uint8_t rest_of(uint16_t word) { return static_cast<uint8_t>((word >> 8 & 0x80) | (word & 0x7f)); }
uint16_t word_of(uint8_t rest, uint8_t exponent) {
  return static_cast<uint16_t>((rest & 0x80) << 8 | exponent << 7 | (rest & 0x7f));
}
uint8_t code_of(uint8_t exponent, uint8_t base) {
  const auto distance = static_cast<uint8_t>(exponent - base);
  if (distance < kWindow) return distance;
  return exponent == 0 ? kZeroCode : kEscapeCode;
}

// What a sample of a frame says: the best base, and which part of the words would be escapes.
struct Sample {
  uint8_t base = 1;
  size_t words = 0;
  size_t escapes = 0;
};

Sample sample_of(const std::byte* words, size_t count) {
  std::array<uint16_t, 256> seen{};
  const size_t step = count / kSampledWords | 1;  // odd: it meets every channel of rows of a power of two
  Sample sample;
  for (size_t i = 0; i < count; i += step, ++sample.words) ++seen[exponent_of(load_word(words + 2 * i))];
  size_t inside = 0;
  for (unsigned e = 1; e <= kWindow; ++e) inside += seen[e];
  size_t best = inside;
  for (unsigned base = 2; base <= kLastBase; ++base) {
    inside += seen[base + kWindow - 1];
    inside -= seen[base - 1];
    if (inside <= best) continue;
    best = inside;
    sample.base = static_cast<uint8_t>(base);
  }
  sample.escapes = sample.words - best - seen[0];
  return sample;
}

// An escape costs three bytes, a code saves half a byte. From a sixth on nothing is saved; at an eighth too little.
bool pays(const Sample& sample) { return sample.escapes * 8 < sample.words; }

bool pays_in_places(std::span<const std::byte> bytes) {
  const size_t words = bytes.size() / 2;
  const size_t frames = (words + kFrameWords - 1) / kFrameWords;
  Sample all;
  for (size_t i = 0; i < std::min(frames, kSampledFrames); ++i) {
    const size_t begin = i * frames / std::min(frames, kSampledFrames) * kFrameWords;
    const Sample sample = sample_of(bytes.data() + 2 * begin, std::min(kFrameWords, words - begin));
    all.words += sample.words;
    all.escapes += sample.escapes;
  }
  return pays(all);
}

// Where the parts of one frame go to, or come from.
struct Parts {
  std::byte* rests;
  std::byte* codes;
  std::byte* escapes;
};

size_t codes_bytes(size_t words) { return (words + 1) / 2; }

std::byte* put_escape(std::byte* at, size_t word, uint8_t exponent) {
  store_word(at, static_cast<uint16_t>(word));
  at[2] = std::byte{exponent};
  return at + kEscapeBytes;
}

// Words `begin` to `end` of a frame, `begin` a whole number of groups. Moves parts.escapes on; stops at `last_escape`.
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

// As encode_plain(), for whole groups.
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
    const __m256i zero = _mm256_cmpeq_epi8(exponents, _mm256_setzero_si256());  // outside too, as no base is 0
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

TORPOR_AVX2 void decode_avx2(const std::byte* rests, const std::byte* codes, size_t end, uint8_t base,
                             std::byte* words) {
  alignas(16) std::array<uint8_t, 16> upper{}, lower{};  // of each code: its exponent's bits 7 to 1, and bit 0
  for (unsigned code = 0; code < kWindow; ++code) {
    upper[code] = static_cast<uint8_t>((base + code) >> 1);
    lower[code] = static_cast<uint8_t>((base + code) << 7);
  }
  const __m256i uppers = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(upper.data())));
  const __m256i lowers = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(lower.data())));
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

#endif

void encode(const std::byte* words, size_t count, uint8_t base, Parts& parts, const std::byte* last_escape,
            [[maybe_unused]] Instructions instructions) {
  size_t done = 0;
#if defined(__x86_64__)
  if (instructions == Instructions::kAvx2) {
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
  if (instructions == Instructions::kAvx2) {
    done = count / kGroupWords * kGroupWords;
    decode_avx2(rests, codes, done, base, words);
  }
#endif
  decode_plain(rests, codes, done, count, base, words);
}

void put_header(std::byte* at, uint8_t base, size_t escapes) {
  at[0] = std::byte{base};
  at[1] = std::byte{0};
  store_word(at + 2, static_cast<uint16_t>(escapes));
}

// Where the frame ends that begins at `out`.
std::byte* encode_frame(const std::byte* words, size_t count, std::byte* out, Instructions instructions) {
  std::byte* const body = out + kHeaderBytes;
  if (const Sample sample = sample_of(words, count); pays(sample)) {
    std::byte* const codes = body + count;
    std::byte* const escapes = codes + codes_bytes(count);
    const size_t most = (count - codes_bytes(count)) / kEscapeBytes;  // with more the words themselves are smaller
    Parts parts{.rests = body, .codes = codes, .escapes = escapes};
    encode(words, count, sample.base, parts, escapes + most * kEscapeBytes, instructions);
    const auto found = static_cast<size_t>(parts.escapes - escapes) / kEscapeBytes;
    if (found < most) {  // else some may have been left out
      put_header(out, sample.base, found);
      return parts.escapes;
    }
  }
  put_header(out, 0, 0);
  std::memcpy(body, words, 2 * count);
  return body + 2 * count;
}

Error damaged(std::string_view what) {
  return Error{.code = Code::kCorruption,
               .what = fmt::format("compressed bf16 values: {}", what),
               .next_step = "use another checkpoint"};
}

// The bytes of `stored` behind its first frame, which has `count` words.
Result<std::span<const std::byte>> decode_frame(std::span<const std::byte> stored, size_t count, std::byte* words,
                                                Instructions instructions) {
  if (stored.size() < kHeaderBytes) return damaged("a frame is cut off");
  const auto base = std::to_integer<uint8_t>(stored[0]);
  const size_t escapes = load_word(stored.data() + 2);
  if (base > kLastBase || stored[1] != std::byte{0} || (base == 0 && escapes != 0))
    return damaged("a frame contradicts itself");
  stored = stored.subspan(kHeaderBytes);
  const size_t size = base == 0 ? 2 * count : count + codes_bytes(count) + escapes * kEscapeBytes;
  if (stored.size() < size) return damaged("a frame is cut off");
  if (base == 0) {
    std::memcpy(words, stored.data(), size);
    return stored.subspan(size);
  }
  decode(stored.data(), stored.data() + count, count, base, words, instructions);
  const std::byte* at = stored.data() + count + codes_bytes(count);
  for (size_t i = 0; i < escapes; ++i, at += kEscapeBytes) {
    const size_t word = load_word(at);
    if (word >= count) return damaged("an escape is not of its frame");
    const std::byte rest = stored[word];
    store_word(words + 2 * word, word_of(std::to_integer<uint8_t>(rest), std::to_integer<uint8_t>(at[2])));
  }
  return stored.subspan(size);
}

}  // namespace

Instructions fastest_instructions() {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (has_avx2) return Instructions::kAvx2;
#endif
  return Instructions::kPlain;
}

uint64_t compressed_bound(uint64_t bytes) {
  const uint64_t frames = (bytes / 2 + kFrameWords - 1) / kFrameWords;
  return bytes + frames * kHeaderBytes + 1;  // of an odd number of words one half byte of the codes is not used
}

std::optional<uint64_t> compress_into(std::span<const std::byte> bytes, std::span<std::byte> out,
                                      Instructions instructions) {
  if (bytes.size() < 2 || out.size() < compressed_bound(bytes.size()) || !pays_in_places(bytes)) return std::nullopt;
  const size_t words = bytes.size() / 2;
  std::byte* at = out.data();
  for (size_t begin = 0; begin < words; begin += kFrameWords)
    at = encode_frame(bytes.data() + 2 * begin, std::min(kFrameWords, words - begin), at, instructions);
  if (bytes.size() % 2 != 0) *at++ = bytes.back();
  const auto size = static_cast<uint64_t>(at - out.data());
  if (size >= bytes.size() - bytes.size() / 8) return std::nullopt;
  return size;
}

Status decompress(std::span<const std::byte> stored, std::span<std::byte> out, Instructions instructions) {
  const size_t words = out.size() / 2;
  for (size_t begin = 0; begin < words; begin += kFrameWords) {
    TORPOR_ASSIGN(stored,
                  decode_frame(stored, std::min(kFrameWords, words - begin), out.data() + 2 * begin, instructions));
  }
  if (stored.size() != out.size() % 2) return damaged("another size was promised");
  if (!stored.empty()) out.back() = stored.front();
  return ok();
}

}  // namespace torpor::bf16
