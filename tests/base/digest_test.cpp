#include <string>

#include "base/digest.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

TEST(Digest, IsXxh3Of128BitsInCanonicalOrder) {
  EXPECT_EQ(digest_of({}).hex(), "99aa06d3014798d86001c324468d497f");  // published for the empty input, seed 0
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
