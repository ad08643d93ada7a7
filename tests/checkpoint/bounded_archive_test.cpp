// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/bounded_archive.h"

#include <map>
#include <optional>

#include "checkpoint/archived_values.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

template <class T>
Result<T> read(const Bytes& bytes) {
  return from_bytes<T>(std::as_bytes(std::span(bytes)), "it");
}

TEST(BoundedArchive, NumbersAreLittleEndianAndOfFixedWidth) {
  EXPECT_EQ(to_bytes(uint32_t{0x01020304}), (Bytes{4, 3, 2, 1}));
  EXPECT_EQ(to_bytes(std::string("ab")), (Bytes{2, 0, 0, 0, 0, 0, 0, 0, 'a', 'b'}));
  EXPECT_EQ(to_bytes(true), (Bytes{1}));
}

TEST(BoundedArchive, I12ALengthThatTheInputCannotHoldIsRefusedBeforeAnythingIsAllocated) {
  for (const uint64_t length : {uint64_t{9}, uint64_t{1} << 40, UINT64_MAX}) {
    Bytes bytes = to_bytes(length);
    bytes.resize(16);  // the length, and eight bytes
    EXPECT_FAILS(read<std::string>(bytes), Code::kCorruption) << length;
    EXPECT_FAILS(read<std::vector<uint8_t>>(bytes), Code::kCorruption) << length;
    EXPECT_FAILS(read<std::vector<int64_t>>(bytes), Code::kCorruption) << length;
    EXPECT_FAILS(read<std::vector<std::string>>(bytes), Code::kCorruption) << length;
    EXPECT_FAILS((read<std::map<std::string, std::string>>(bytes)), Code::kCorruption) << length;
  }
}

TEST(BoundedArchive, LeftOverAndMissingBytesAreErrors) {
  Bytes bytes = to_bytes(std::string("abc"));
  EXPECT_EQ(test::value_of(read<std::string>(bytes)), "abc");
  bytes.push_back(0);
  EXPECT_FAILS(read<std::string>(bytes), Code::kCorruption, "left over");
  bytes.resize(10);
  EXPECT_FAILS(read<std::string>(bytes), Code::kCorruption);
}

TEST(BoundedArchive, TruthValuesEnumsAndVariantsAreCheckedAgainstTheirRange) {
  EXPECT_FAILS(read<bool>({2}), Code::kCorruption, "truth");
  EXPECT_FAILS(read<Value>({99}), Code::kCorruption, "kind of value");
  ChunkKey key;
  Bytes bytes = to_bytes(key);
  bytes[0] = 2;
  EXPECT_FAILS(read<ChunkKey>(bytes), Code::kCorruption, "kinds");
}

TEST(BoundedArchive, TreesHaveALargestDepth) {
  const auto nested = [](int depth) {
    Value value;
    for (int i = 1; i < depth; ++i) value = Value{List{std::move(value)}};
    return to_bytes(value);
  };
  EXPECT_SUCCEEDS(read<Value>(nested(kMaxValueDepth)));
  EXPECT_FAILS(read<Value>(nested(kMaxValueDepth + 1)), Code::kCorruption, "deep");
  Bytes bomb;
  for (int i = 0; i < 100'000; ++i) {
    const Bytes level{8, 1, 0, 0, 0, 0, 0, 0, 0};  // a list of one
    bomb.insert(bomb.end(), level.begin(), level.end());
  }
  EXPECT_FAILS(read<Value>(bomb), Code::kCorruption);
}

}  // namespace
}  // namespace torpor
