// SPDX-License-Identifier: Apache-2.0
#include "offload/bf16_codec.h"

#include <bit>
#include <cmath>
#include <random>

#include "offload/codec.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using Words = std::vector<uint16_t>;

std::span<const std::byte> view(const Words& words) { return std::as_bytes(std::span(words)); }

uint16_t to_bf16(float value) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16); }

Words gaussian(size_t count, float scale) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, scale);
  Words words(count);
  for (uint16_t& word : words) word = to_bf16(normal(random));
  return words;
}

std::optional<Bytes> pack(std::span<const std::byte> bytes) {
  Bytes out(bf16::compressed_bound(bytes.size()));
  const auto size = bf16::compress_into(bytes, std::as_writable_bytes(std::span(out)));
  if (!size) return std::nullopt;
  out.resize(*size);
  return out;
}

Status unpack(const Bytes& packed, std::span<std::byte> out) {
  return bf16::decompress(std::as_bytes(std::span(packed)), out);
}

void expect_comes_back(std::span<const std::byte> bytes) {
  const auto packed = pack(bytes);
  ASSERT_TRUE(packed.has_value()) << bytes.size();
  std::vector<std::byte> again(bytes.size());
  ASSERT_SUCCEEDS(unpack(*packed, again));
  EXPECT_TRUE(std::ranges::equal(again, bytes)) << bytes.size();
}

TEST(Bf16Codec, WeightsShrinkToThreeQuarters) {
  const Words words = gaussian(300'000, 0.02F);
  EXPECT_LT(static_cast<double>(pack(view(words))->size()), static_cast<double>(words.size()) * 2 / 1.325);
  expect_comes_back(view(words));
}

// Groups of 32 words, frames of 65,536, and an odd byte: around the ends of each.
TEST(Bf16Codec, EverySizeComesBack) {
  const Words words = gaussian(3 * 65'536 + 40, 3.0F);
  for (const size_t base : {size_t{0}, size_t{65'536}, size_t{131'072}, size_t{196'608}})
    for (size_t more = 20; more < 100; ++more)
      for (const size_t odd : {0, 1}) {
        if (2 * (base + more) + odd <= 2 * words.size()) expect_comes_back(view(words).first(2 * (base + more) + odd));
      }
}

TEST(Bf16Codec, EveryWordComesBack) {
  Words words = gaussian(4 * 65'536, 0.5F);
  for (size_t i = 0; i < 65'536; ++i) words[4 * i + 1] = 0;                        // many zeros cost nothing
  for (size_t i = 0; i < 65'536; i += 3) words[4 * i] = static_cast<uint16_t>(i);  // NaN, infinity, subnormal, -0
  expect_comes_back(view(words));
  std::ranges::fill(words, uint16_t{0});
  expect_comes_back(view(words));
  std::ranges::fill(words, uint16_t{0xffff});  // the last base there is
  expect_comes_back(view(words));
}

// What one processor wrote another reads, and by all instructions the bytes are the same. Sizes around groups and pairs
// of them, at places that are aligned to nothing.
TEST(Bf16Codec, InstructionsDifferInSpeedOnly) {
  using bf16::Instructions;
  const Instructions fastest = bf16::fastest_instructions();
  if (fastest == Instructions::kPlain) GTEST_SKIP() << "there is only one kind here";
  Words all = gaussian(2 * 65'536 + 177, 0.3F);
  for (size_t i = 0; i < all.size(); i += 91) all[i] = static_cast<uint16_t>(i * 7);
  for (size_t i = 5; i < all.size(); i += 13) all[i] = 0;
  for (size_t size = all.size() - 100; size <= all.size(); size += 3) {
    const Words words(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(size));
    const auto by = [&](Instructions instructions) {
      Bytes out(bf16::compressed_bound(view(words).size()) + 1);
      out.resize(1 +
                 *bf16::compress_into(view(words), std::as_writable_bytes(std::span(out)).subspan(1), instructions));
      return out;
    };
    const Bytes packed = by(Instructions::kPlain);
    for (const auto instructions : {Instructions::kPlain, Instructions::kAvx2, Instructions::kAvx512}) {
      if (instructions > fastest) break;
      ASSERT_EQ(packed, by(instructions)) << size;
      Words again(words.size());
      ASSERT_SUCCEEDS(bf16::decompress(std::as_bytes(std::span(packed)).subspan(1),
                                       std::as_writable_bytes(std::span(again)), instructions));
      ASSERT_EQ(again, words) << size;
    }
  }
}

// The frames between those that a sample looks at are noise, of which the sample says nothing.
TEST(Bf16Codec, FramesOfNoiseStayAsTheyAre) {
  constexpr size_t kFrame = 65'536;
  Words words = gaussian(64 * kFrame, 0.1F);
  std::mt19937 random(3);
  for (size_t frame = 1; frame < 64; frame += 8)
    for (size_t i = 0; i < kFrame; ++i) words[frame * kFrame + i] = static_cast<uint16_t>(random());
  expect_comes_back(view(words));
}

// Escapes wherever the sample of a frame, each 257th word, does not look.
TEST(Bf16Codec, AFrameThatTheSampleMisjudgedComesBack) {
  Words words = gaussian(8 * 65'536, 0.1F);
  for (size_t i = 0; i < words.size(); ++i)
    if (i < 65'536 && i % 257 != 0) words[i] = static_cast<uint16_t>((i * 1021) & 0xffff);
  expect_comes_back(view(words));
}

TEST(Bf16Codec, WhatDoesNotPayIsLeftAlone) {
  std::mt19937 random(1);
  Words noise(100'000);
  for (uint16_t& word : noise) word = static_cast<uint16_t>(random());
  EXPECT_FALSE(pack(view(noise)));
  std::normal_distribution<float> normal;
  std::vector<float> floats(100'000);
  for (float& each : floats) each = normal(random);
  EXPECT_FALSE(pack(std::as_bytes(std::span(floats))));
  EXPECT_FALSE(pack({}));
  EXPECT_FALSE(pack(view(noise).first(1)));
}

TEST(Bf16Codec, DamageIsCorruption) {
  const Words words = gaussian(65'536 + 300, 1.0F);
  const auto bytes = view(words);
  const Bytes packed = *pack(bytes);
  std::vector<std::byte> out(bytes.size());
  for (size_t cut = 0; cut < packed.size(); cut += cut < 64 || cut + 64 > packed.size() ? 1 : 997)
    EXPECT_FAILS(unpack(Bytes(packed.begin(), packed.begin() + static_cast<std::ptrdiff_t>(cut)), out),
                 Code::kCorruption)
        << cut;
  Bytes longer = packed;
  longer.push_back(0);
  EXPECT_FAILS(unpack(longer, out), Code::kCorruption);
  const auto changed = [&](size_t place, uint8_t value) {
    Bytes bad = packed;
    bad[place] = value;
    return unpack(bad, out);
  };
  EXPECT_FAILS(changed(0, 0), Code::kCorruption);    // a frame as it is would be longer
  EXPECT_FAILS(changed(0, 243), Code::kCorruption);  // no base
  EXPECT_FAILS(changed(1, 1), Code::kCorruption);
  EXPECT_FAILS(changed(2, 0xff), Code::kCorruption);  // more escapes than there are bytes
  for (const size_t size : {bytes.size() - 2, bytes.size() - 1, bytes.size() + 1, bytes.size() + 2}) {
    out.resize(size);
    EXPECT_FAILS(unpack(packed, out), Code::kCorruption) << size;
  }
}

// A frame of two words whose escape names a third.
TEST(Bf16Codec, AnEscapeStaysInItsFrame) {
  std::vector<std::byte> out(4);
  Bytes packed{100, 0, 1, 0, /* rests */ 1, 2, /* codes */ 0xf0, /* escape */ 1, 0, 200};
  ASSERT_SUCCEEDS(unpack(packed, out));
  EXPECT_EQ(out[2], std::byte{2});
  EXPECT_EQ(out[3], std::byte{100});
  packed[7] = 2;
  EXPECT_FAILS(unpack(packed, out), Code::kCorruption);
}

TEST(Compression, IsAskedForByNameAndLevel) {
  EXPECT_EQ(CompressionOptions::of({}, {})->codec, Codec::kNone);
  EXPECT_EQ(CompressionOptions::of("none", {})->codec, Codec::kNone);
  EXPECT_EQ(CompressionOptions::of("zstd", {})->codec, Codec::kZstd);
  EXPECT_EQ(CompressionOptions::of({}, 3)->codec, Codec::kZstd);
  EXPECT_EQ(CompressionOptions::of({}, 3)->level, 3);
  EXPECT_EQ(CompressionOptions::of("bf16", {})->codec, Codec::kBf16);
  EXPECT_FAILS(CompressionOptions::of("bf16", 3), Code::kInvalidArgument);
  EXPECT_FAILS(CompressionOptions::of("lz4", {}), Code::kInvalidArgument);
}

}  // namespace
}  // namespace torpor
