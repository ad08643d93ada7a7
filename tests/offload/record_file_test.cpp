// SPDX-License-Identifier: Apache-2.0
// What of a record's place and bytes is part of two formats: checkpoint/FORMAT.md and offload/SEGMENTS.md.
#include "offload/record_file.h"

#include <algorithm>

#include "base/page_buffer.h"
#include "tests/offload/disk_world.h"

namespace torpor {
namespace {

using namespace test;

constexpr int32_t kRank = 3;

TEST(RecordFile, ARecordBeginsOnAPageOrOnAMiBIfItHasSoManyWholeOnes) {
  EXPECT_EQ(record_offset(0, 1), 0u);
  EXPECT_EQ(record_offset(1, 1), kPage);
  EXPECT_EQ(record_offset(kPage, kMiB - 1), kPage);
  EXPECT_EQ(record_offset(kPage, kMiB), kMiB);
  EXPECT_EQ(record_offset(kPage, kMiB + kPage), kPage);
  EXPECT_EQ(record_offset(kMiB + 1, 3 * kMiB), 2 * kMiB);
}

TEST(RecordFile, WholePagesAreWrittenFromWhereTheyAreAndOthersEndWithZeros) {
  PageBuffer memory, scratch;
  const std::span<std::byte> bytes = memory.room(2 * kPage).first(2 * kPage);
  std::fill(bytes.begin(), bytes.end(), std::byte{7});
  std::span<std::byte> room = scratch.room(2 * kPage).first(2 * kPage);
  std::fill(room.begin(), room.end(), std::byte{0xee});
  const RecordFile file(nullptr, kRank);
  const CompressionOptions as_it_is{.codec = Codec::kNone};

  EXPECT_EQ(file.scratch_to_encode(bytes, as_it_is), 0u);
  FileRecord whole{.bytes = bytes};
  file.encode(whole, room, as_it_is);
  EXPECT_EQ(whole.pages.data(), bytes.data());
  EXPECT_EQ(room.size(), 2 * kPage);

  FileRecord part{.bytes = bytes.subspan(8, 100)};
  EXPECT_EQ(file.scratch_to_encode(part.bytes, as_it_is), kPage);
  file.encode(part, room, as_it_is);
  EXPECT_EQ(room.size(), kPage);
  EXPECT_EQ(part.stored, 100u);
  ASSERT_EQ(part.pages.size(), kPage);
  EXPECT_EQ(std::count(part.pages.begin(), part.pages.begin() + 100, std::byte{7}), 100);
  EXPECT_EQ(std::count(part.pages.begin() + 100, part.pages.end(), std::byte{0}), static_cast<long>(kPage) - 100);
}

// A sealed record on disk, as a reader of its own opens it, and as what it is not.
TEST(RecordFile, TheSealKnowsKeySizeFormRankAndPlace) {
  const Seal seal(*a_key(5), SealId{9}, Protection::kEncrypted);
  const TemporaryDirectory temporary;
  const auto directory = value_of(linux_file_system().open_directory(temporary.path(), false));
  const auto opened = value_of(directory->create_file("records"));
  std::vector<std::byte> bytes = some_bytes(1, 100);
  PageBuffer scratch;
  std::span<std::byte> room = scratch.room(kPage).first(kPage);
  FileRecord record{.bytes = bytes, .key = "weights/w[1]", .offset = 2 * kPage};
  const RecordFile file(&seal, kRank);
  file.encode(record, room, {.codec = Codec::kNone});
  file.seal(record);
  ASSERT_SUCCEEDS(opened->pwrite(record.pages, record.offset));

  std::vector<std::byte> stored(record.pages.begin(), record.pages.begin() + 100);
  EXPECT_NE(stored, bytes);
  const std::string_view name = "weights/w[1] of 100 bytes, none";
  ASSERT_SUCCEEDS(seal.open(stored, record.seal, {SealPlace::Kind::kChunk, kRank, 2 * kPage, name}));
  EXPECT_EQ(stored, bytes);

  const auto read = [&](FileRecord as, int32_t rank) {
    std::vector<std::byte> back(as.bytes.size());
    as.bytes = back;
    room = scratch.room(kPage).first(kPage);
    RecordFile(&seal, rank).read(*opened, {&as, 1}, room);
    if (as.status) {
      EXPECT_EQ(back, bytes);
    }
    return as.status;
  };
  EXPECT_SUCCEEDS(read(record, kRank));
  EXPECT_FAILS(read(record, kRank + 1), Code::kCorruption);
  FileRecord other = record;
  other.key = "weights/w[2]";
  EXPECT_FAILS(read(other, kRank), Code::kCorruption);
  other = record;
  other.codec = Codec::kZstd;
  EXPECT_FAILS(read(other, kRank), Code::kCorruption);
  ASSERT_SUCCEEDS(opened->pwrite(record.pages, 4 * kPage));
  other = record;
  other.offset = 4 * kPage;
  EXPECT_FAILS(read(other, kRank), Code::kCorruption);
}

}  // namespace
}  // namespace torpor
