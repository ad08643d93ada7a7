// SPDX-License-Identifier: Apache-2.0
#include "offload/codec.h"

#include <random>

#include "tests/support/results.h"

namespace torpor {
namespace {

std::span<const std::byte> view(const Bytes& bytes) { return std::as_bytes(std::span(bytes)); }

TEST(Codec, RegularBytesGetSmallerAndComeBack) {
  Bytes bytes(100'000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i % 17);
  const auto packed = compress(view(bytes));
  ASSERT_TRUE(packed.has_value());
  EXPECT_LT(packed->size(), bytes.size() / 10);
  Bytes again(bytes.size());
  ASSERT_SUCCEEDS(decompress(Codec::kZstd, view(*packed), std::as_writable_bytes(std::span(again))));
  EXPECT_EQ(again, bytes);
}

TEST(Codec, NoiseIsNotPacked) {
  Bytes bytes(10'000);
  std::mt19937 random(1);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  EXPECT_FALSE(compress(view(bytes)).has_value());
}

TEST(Codec, DamagedOrOtherwiseSizedInputIsCorruption) {
  const Bytes bytes(5'000, 3);
  Bytes packed = *compress(view(bytes));
  for (const size_t size : {size_t{0}, size_t{4'999}, size_t{5'001}}) {
    Bytes out(size);
    EXPECT_FAILS(decompress(Codec::kZstd, view(packed), std::as_writable_bytes(std::span(out))), Code::kCorruption)
        << size;
  }
  Bytes out(5'000);
  for (size_t cut = 0; cut < packed.size(); ++cut) {
    const Bytes part(packed.begin(), packed.begin() + static_cast<std::ptrdiff_t>(cut));
    EXPECT_FAILS(decompress(Codec::kZstd, view(part), std::as_writable_bytes(std::span(out))), Code::kCorruption)
        << cut;
  }
}

}  // namespace
}  // namespace torpor
