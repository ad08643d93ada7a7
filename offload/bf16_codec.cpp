// SPDX-License-Identifier: Apache-2.0
#include "offload/bf16_codec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include <fmt/core.h>

#include "offload/bf16_words.h"

namespace torpor::bf16 {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr size_t kFrameWords = 65'536;  // so a word's number fits 16 bits
constexpr size_t kHeaderBytes = 4;
constexpr unsigned kLastBase = 256 - kWindow;
constexpr size_t kSampledWords = 256;  // in each sampled frame
constexpr size_t kSampledFrames = 8;   // in the whole input

// The result of sampling a frame: the best base, and the fraction of words that would be escapes.
struct Sample {
  uint8_t base = 1;
  size_t words = 0;
  size_t escapes = 0;
};

Sample sample_of(const std::byte* words, size_t count) {
  std::array<uint16_t, 256> seen{};
  const size_t step = count / kSampledWords | 1;  // odd, so that it meets every channel if rows are a power of two long
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

// An escape costs three bytes, a code saves half a byte. If a sixth of the words are escapes, nothing is saved; at an
// eighth the saving is too small.
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

size_t codes_bytes(size_t words) { return (words + 1) / 2; }

void put_header(std::byte* at, uint8_t base, size_t escapes) {
  at[0] = std::byte{base};
  at[1] = std::byte{0};
  store_word(at + 2, static_cast<uint16_t>(escapes));
}

// Encode one frame at `out`. Return its end.
std::byte* encode_frame(const std::byte* words, size_t count, std::byte* out, Instructions instructions) {
  std::byte* const body = out + kHeaderBytes;
  if (const Sample sample = sample_of(words, count); pays(sample)) {
    std::byte* const codes = body + count;
    std::byte* const escapes = codes + codes_bytes(count);
    // If there are more escapes, the unchanged words are smaller.
    const size_t most = (count - codes_bytes(count)) / kEscapeBytes;
    Parts parts{.rests = body, .codes = codes, .escapes = escapes};
    encode(words, count, sample.base, parts, escapes + most * kEscapeBytes, instructions);
    const auto found = static_cast<size_t>(parts.escapes - escapes) / kEscapeBytes;
    if (found < most) {  // else some escapes may be missing
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

// Decode the first frame of `stored`, which has `count` words. Return the bytes behind it.
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

uint64_t compressed_bound(uint64_t bytes) {
  const uint64_t frames = (bytes / 2 + kFrameWords - 1) / kFrameWords;
  return bytes + frames * kHeaderBytes + 1;  // an odd number of words leaves half a byte of codes unused
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
    TORPOR_ASSIGN_OR_RETURN(
        stored, decode_frame(stored, std::min(kFrameWords, words - begin), out.data() + 2 * begin, instructions));
  }
  if (stored.size() != out.size() % 2) return damaged("another size was promised");
  if (!stored.empty()) out.back() = stored.front();
  return ok();
}

}  // namespace torpor::bf16
