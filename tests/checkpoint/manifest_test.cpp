// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/manifest.h"
#include "checkpoint/manifest_codec.h"

#include "tests/support/results.h"

namespace torpor {
namespace {

std::span<const std::byte> view(const Bytes& bytes) { return std::as_bytes(std::span(bytes)); }

Manifest example() {
  Manifest manifest{.generation = 7, .created_unix_seconds = 1.5e9, .creator = "torpor test"};
  manifest.sections = {{.name = "requests", .offset = 0, .stored_bytes = 10, .bytes = 30, .codec = Codec::kZstd},
                       {.name = "queues", .offset = 10, .stored_bytes = 5, .bytes = 5}};
  manifest.ranks = {{.rank = 0,
                     .refs = "refs-r0",
                     .refs_bytes = 200,
                     .files = {{.name = "chunks-r0", .bytes = 8192}, {.name = "link", .id = {1}, .bytes = 4096}},
                     .tags = {{"weights", {.records = 1, .bytes = 4000, .stored_bytes = 4000}}}}};
  return manifest;
}

TEST(Manifest, WhatIsEncodedIsDecoded) {
  EXPECT_EQ(test::value_of(decode_manifest(view(encode_manifest(example())))).manifest, example());
}

TEST(Manifest, EveryFlippedBitIsFound) {
  const Bytes bytes = encode_manifest(example());
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    Bytes damaged = bytes;
    damaged[bit / 8] ^= static_cast<uint8_t>(1 << (bit % 8));
    const Result<OpenedManifest> decoded = decode_manifest(view(damaged));
    ASSERT_FALSE(decoded.has_value()) << "bit " << bit;
    EXPECT_TRUE(decoded.error().code == Code::kCorruption || decoded.error().code == Code::kIncompatible ||
                decoded.error().code == Code::kUnauthenticated);
  }
}

TEST(Manifest, EveryTruncationAndAppendedByteIsFound) {
  const Bytes bytes = encode_manifest(example());
  for (size_t cut = 0; cut < bytes.size(); ++cut) {
    EXPECT_FAILS(decode_manifest(view(Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(cut)))),
                 Code::kCorruption)
        << cut;
  }
  Bytes longer = bytes;
  longer.push_back(0);
  EXPECT_FAILS(decode_manifest(view(longer)), Code::kCorruption);
}

TEST(Manifest, AnotherFormatVersionIsIncompatibleAndSaysWhich) {
  Bytes newer = encode_manifest(example());
  newer[8] = kFormatVersion + 1;
  EXPECT_FAILS(decode_manifest(view(newer)), Code::kIncompatible, std::to_string(kFormatVersion + 1));
}

TEST(Manifest, ContradictionsAreFound) {
  const auto damaged = [](auto damage) {
    Manifest manifest = example();
    damage(manifest);
    return decode_manifest(view(encode_manifest(manifest)));
  };
  EXPECT_FAILS(damaged([](Manifest& m) { m.sections[1].name = "requests"; }), Code::kCorruption);
  EXPECT_FAILS(damaged([](Manifest& m) { m.sections[1].offset = UINT64_MAX; }), Code::kCorruption);
  EXPECT_FAILS(damaged([](Manifest& m) { m.ranks.push_back(m.ranks[0]); }), Code::kCorruption);
  EXPECT_FAILS(damaged([](Manifest& m) { m.ranks[0].rank = -1; }), Code::kCorruption);
  EXPECT_FAILS(damaged([](Manifest& m) { m.ranks[0].refs = "../refs"; }), Code::kCorruption);
  EXPECT_FAILS(damaged([](Manifest& m) { m.ranks[0].refs_bytes = UINT64_MAX; }), Code::kCorruption);
  EXPECT_FAILS(damaged([](Manifest& m) { m.ranks[0].files.clear(); }), Code::kCorruption, "file of its own");
  EXPECT_FAILS(damaged([](Manifest& m) { m.ranks[0].files[0].id = {2}; }), Code::kCorruption, "file of its own");
  EXPECT_FAILS(damaged([](Manifest& m) { m.ranks[0].files[1].id = {}; }), Code::kCorruption, "listed twice");
  EXPECT_FAILS(damaged([](Manifest& m) { m.ranks[0].files[1].name = "chunks-r0"; }), Code::kCorruption, "listed twice");
  EXPECT_FAILS(damaged([](Manifest& m) { m.ranks[0].files[1].name = "refs-r0"; }), Code::kCorruption, "listed twice");
  EXPECT_FAILS(damaged([](Manifest& m) { m.ranks[0].files[1].name = "g-000001/chunks-r0"; }), Code::kCorruption);
}

}  // namespace
}  // namespace torpor
