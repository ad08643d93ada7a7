// SPDX-License-Identifier: Apache-2.0
#include <xxhash.h>

#include <string>

#include "base/digest.h"
#include "base/xxh3.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

TEST(Digest, IsXxh3Of128BitsInCanonicalOrder) {
  EXPECT_EQ(digest_of({}).hex(), "99aa06d3014798d86001c324468d497f");  // published for the empty input, seed 0
}

// One for each piece of a batch: no memory is taken for it, and a copy goes its own way.
TEST(Digest, IsAValue) {
  static_assert(std::is_trivially_copyable_v<StreamingDigest>);
  StreamingDigest first;
  first.update(bytes_of("one"));
  StreamingDigest second = first;
  first.update(bytes_of("two"));
  second.update(bytes_of("three"));
  EXPECT_EQ(first.finish(), digest_of(bytes_of("onetwo")));
  EXPECT_EQ(second.finish(), digest_of(bytes_of("onethree")));
}

TEST(Digest, InPiecesEqualsInOne) {
  std::string text(100'000, '\0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 131);
  for (const size_t piece : {1u, 7u, 1024u, 65536u}) {
    StreamingDigest streaming;
    for (size_t at = 0; at < text.size(); at += piece)
      streaming.update(bytes_of(text).subspan(at, std::min(piece, text.size() - at)));
    EXPECT_EQ(streaming.finish(), digest_of(bytes_of(text))) << piece;
  }
}

// What one machine wrote another one reads.
TEST(Digest, IsTheSameWithVectorsOfEveryWidth) {
  std::vector<Xxh3> widths;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) widths.push_back(kXxh3Avx2);
  if (__builtin_cpu_supports("avx512f")) widths.push_back(kXxh3Avx512);
#endif
  std::string text(3000, '\0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>(i * 131);
  for (size_t size = 0; size <= text.size(); ++size) {
    const XXH128_hash_t expected = XXH3_128bits(text.data(), size);
    for (const Xxh3& width : widths) {
      const Xxh3Hash hash = width.hash(text.data(), size);
      ASSERT_TRUE(hash.low == expected.low64 && hash.high == expected.high64) << size;
      XXH3_state_t* state = XXH3_createState();
      XXH3_128bits_reset(state);
      for (size_t at = 0; at < size; at += 701) width.update(state, text.data() + at, std::min<size_t>(701, size - at));
      EXPECT_TRUE(XXH128_isEqual(XXH3_128bits_digest(state), expected)) << size;
      XXH3_freeState(state);
    }
  }
}

TEST(Digest, EveryBitCounts) {
  std::string text(64, 'a');
  const Digest before = digest_of(bytes_of(text));
  for (size_t bit = 0; bit < text.size() * 8; ++bit) {
    text[bit / 8] ^= static_cast<char>(1 << (bit % 8));
    EXPECT_NE(digest_of(bytes_of(text)), before) << bit;
    text[bit / 8] ^= static_cast<char>(1 << (bit % 8));
  }
}

}  // namespace
}  // namespace torpor
