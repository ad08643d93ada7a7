// SPDX-License-Identifier: Apache-2.0
#include "remote/checkpoint_index.h"

#include <nlohmann/json.hpp>

#include "remote/object_keys.h"
#include "tests/support/results.h"

namespace torpor::remote {
namespace {

using Json = nlohmann::ordered_json;

CheckpointIndex example() {
  return {.id = std::string(32, 'a'),
          .generation = 7,
          .created_unix_seconds = 1763881200,
          .creator = "torpor",
          .files = {{"MANIFEST", 100, {std::string(64, '1')}},
                    {"STATE", 0, {}},
                    {"chunks-r0", kPartBytes + 1, {std::string(64, '2'), std::string(64, '3')}}}};
}

TEST(CheckpointIndex, ComesBackAsItWas) {
  const CheckpointIndex index = example();
  EXPECT_EQ(test::value_of(decode_index(encode_index(index))), index);
  for (const bool labelled : {false, true}) {
    CheckpointIndex with = index;
    with.has_metadata = labelled;
    EXPECT_EQ(test::value_of(decode_index(encode_index(with))), with);
  }
  EXPECT_EQ(index_name(index), "20251123T070000Z-" + std::string(32, 'a'));
  EXPECT_TRUE(is_key(index_key(index_name(index))));
  EXPECT_EQ(part_key("abcd"), "parts/ab/abcd");
}

TEST(CheckpointIndex, NothingThatNoCheckpointHasIsBelieved) {
  const auto changed = [](const std::function<void(Json&)>& change) {
    Json json = Json::parse(encode_index(example()));
    change(json);
    return decode_index(json.dump());
  };
  for (const char* name : {"../x", "a/b", "", "LOCK", "WOKEN", "chunks-r0/../../x", "chunks-r0\n", "refs-R0"})
    EXPECT_FAILS(changed([&](Json& json) { json["files"][2]["name"] = name; }), Code::kCorruption, "name") << name;
  EXPECT_FAILS(changed([](Json& json) { json["files"][2]["name"] = "STATE"; }), Code::kCorruption, "twice");
  EXPECT_FAILS(changed([](Json& json) { json["files"][2]["bytes"] = 5; }), Code::kCorruption, "2 parts for 5 bytes");
  EXPECT_FAILS(changed([](Json& json) { json["files"][2]["bytes"] = -1; }), Code::kCorruption);
  EXPECT_FAILS(changed([](Json& json) { json["files"][2]["bytes"] = uint64_t{1} << 63; }), Code::kCorruption);
  EXPECT_FAILS(changed([](Json& json) { json["files"][2]["parts"][0] = "../../etc"; }), Code::kCorruption, "hash");
  EXPECT_FAILS(changed([](Json& json) { json["files"].erase(0); }), Code::kCorruption, "MANIFEST");
  EXPECT_FAILS(changed([](Json& json) { json["files"] = Json::array(); }), Code::kCorruption, "MANIFEST");
  EXPECT_FAILS(changed([](Json& json) { json["metadata"] = "yes"; }), Code::kCorruption, "metadata");
  EXPECT_FAILS(changed([](Json& json) { json["id"] = "x"; }), Code::kCorruption, "id");
  EXPECT_FAILS(changed([](Json& json) { json["created_unix_seconds"] = 1e300; }), Code::kCorruption, "time");
  EXPECT_FAILS(changed([](Json& json) { json["torpor_checkpoint"] = 2; }), Code::kIncompatible);
  EXPECT_FAILS(changed([](Json& json) { json["part_bytes"] = 1; }), Code::kIncompatible);
  const Json whole = Json::parse(encode_index(example()));
  for (const auto& field : whole.items()) EXPECT_FALSE(changed([&](Json& json) { json.erase(field.key()); }));
  EXPECT_FAILS(decode_index(""), Code::kCorruption);
  EXPECT_FAILS(decode_index("[1]"), Code::kCorruption);
  EXPECT_FAILS(decode_index(std::string(100'000, '[')), Code::kCorruption);
}

TEST(ObjectKeys, NothingThatAFileSystemOrAUrlTakesApart) {
  EXPECT_TRUE(is_key("a/b.c_d-e/9"));
  for (const char* text : {"", "/", "a/", "/a", "a//b", ".", "a/..", "a b", "a%20", "a?b", "a\\b"})
    EXPECT_FALSE(is_key(text)) << text;
  EXPECT_FALSE(is_key(std::string(901, 'a')));
}

}  // namespace
}  // namespace torpor::remote
