// SPDX-License-Identifier: Apache-2.0
// The file of a rank's refs, and all that can be wrong with it.
#include "checkpoint/refs_codec.h"

#include "base/units.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

constexpr SealId kId{9};

RankRefs example() {
  RankRefs refs{
      .rank = 2,
      .files = {{.name = "chunks-r2", .id = kId, .bytes = 3 * kPage}, {.name = "link", .id = {1}, .bytes = kPage}}};
  refs.records = {{.key = {.tag = "weights", .region = "w"}, .bytes = 4000, .offset = kPage, .stored_bytes = 4000},
                  {.key = {.kind = ChunkKind::kKvBlock, .tag = "kv_cache", .index = 3},
                   .bytes = 5000,
                   .codec = Codec::kZstd,
                   .offset = 0,
                   .stored_bytes = 4096,
                   .file = 1}};
  return refs;
}

struct Written {
  RankSummary summary;
  Bytes file;
};
Written written(const RankRefs& refs, const Seal* seal = nullptr) {
  EncodedRefs encoded = encode_refs(refs, kId, seal);
  Written result{summary_of(refs), std::move(encoded.file)};
  result.summary.refs = refs_file_name(refs.rank);
  result.summary.refs_bytes = result.file.size();
  result.summary.refs_mac = encoded.mac;
  return result;
}
Result<RankRefs> read(const Written& from, const Seal* seal = nullptr, SealId id = kId) {
  return decode_refs(std::as_bytes(std::span(from.file)), from.summary, id, seal);
}

TEST(Refs, WhatIsEncodedIsDecoded) {
  EXPECT_EQ(test::value_of(read(written(example()))), example());
  const Key key(std::array<uint8_t, kKeyBytes>{5});
  for (const Protection protection : {Protection::kAuthenticated, Protection::kEncrypted}) {
    const Seal seal(key, kId, protection);
    const Written sealed = written(example(), &seal);
    EXPECT_EQ(test::value_of(read(sealed, &seal)), example());
    const std::string text(sealed.file.begin(), sealed.file.end());
    EXPECT_EQ(text.find("weights") == std::string::npos, protection == Protection::kEncrypted);
    EXPECT_FAILS(read(sealed), Code::kCorruption, "digest");
    EXPECT_FAILS(read(written(example()), &seal), Code::kCorruption, "digest");
  }
}

TEST(Refs, EveryFlippedBitAndTruncationIsFound) {
  const Written whole = written(example());
  for (size_t bit = 0; bit < whole.file.size() * 8; ++bit) {
    Written damaged = whole;
    damaged.file[bit / 8] ^= static_cast<uint8_t>(1 << (bit % 8));
    ASSERT_TRUE(test::failed_with(read(damaged), Code::kCorruption, "digest")) << bit;
  }
  for (size_t cut = 0; cut < whole.file.size(); ++cut) {
    Written damaged = whole;
    damaged.file.resize(cut);
    ASSERT_TRUE(test::failed_with(read(damaged), Code::kCorruption, "bytes")) << cut;
  }
}

// Whoever can make a right digest still cannot say what cannot be.
TEST(Refs, ContradictionsAreFound) {
  const auto damaged = [](auto damage) {
    RankRefs refs = example();
    damage(refs);
    return read(written(refs));
  };
  EXPECT_FAILS(damaged([](RankRefs& r) { r.records.push_back(r.records[0]); }), Code::kCorruption, "listed twice");
  EXPECT_FAILS(damaged([](RankRefs& r) { r.records[0].file = 2; }), Code::kCorruption, "not listed");
  EXPECT_FAILS(damaged([](RankRefs& r) { r.records[0].offset = 3 * kPage; }), Code::kCorruption, "outside chunks-r2");
  EXPECT_FAILS(damaged([](RankRefs& r) { r.records[1].stored_bytes = kPage + 1; }), Code::kCorruption, "outside link");
  EXPECT_FAILS(damaged([](RankRefs& r) { r.records[1].offset = UINT64_MAX; }), Code::kCorruption, "outside link");
  // Against what MANIFEST says of it.
  const auto other = [](auto change) {
    Written whole = written(example());
    change(whole.summary);
    return read(whole);
  };
  EXPECT_FAILS(other([](RankSummary& s) { s.rank = 1; }), Code::kCorruption, "another rank");
  EXPECT_FAILS(other([](RankSummary& s) { s.files[1].bytes += 1; }), Code::kCorruption, "other files");
  EXPECT_FAILS(other([](RankSummary& s) { s.files.pop_back(); }), Code::kCorruption, "other files");
  EXPECT_FAILS(other([](RankSummary& s) { s.tags.at("weights").bytes += 1; }), Code::kCorruption, "not those");
  EXPECT_FAILS(other([](RankSummary& s) { s.tags.erase("kv_cache"); }), Code::kCorruption, "not those");
  EXPECT_FAILS(read(written(example()), nullptr, SealId{8}), Code::kCorruption, "another rank or checkpoint");
}

TEST(Refs, AnotherVersionIsIncompatible) {
  Written newer = written(example());
  newer.file[8] = 2;
  const auto bytes = std::as_bytes(std::span(newer.file));
  newer.summary.refs_mac = unkeyed_mac(bytes.first(64), bytes.subspan(64));
  EXPECT_FAILS(read(newer), Code::kIncompatible, "version 2");
}

}  // namespace
}  // namespace torpor
