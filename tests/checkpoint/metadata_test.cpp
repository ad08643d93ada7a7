// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/metadata.h"

#include <filesystem>
#include <fstream>

#include "checkpoint/checkpoint_set.h"
#include "checkpoint/state_sections.h"
#include "checkpoint/verify.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/written_checkpoint.h"

namespace torpor {
namespace {

using test::example_checkpoint;
using test::value_of;

const Metadata kRun{{"run", "7"}, {"step", "1200"}, {"empty", ""}};
const Metadata kValues{{"run", "7"},
                       {"quoted", "a \"word\" é\n"},
                       {"step", MetadataValue::json("1200")},
                       {"loss", MetadataValue::json("-1.5e-3")},
                       {"best", MetadataValue::json("true")},
                       {"parent", MetadataValue::json("null")},
                       {"tags", MetadataValue::json(R"(["a",{"b":[1,2]}])")}};

EngineCheckpoint labelled(const Metadata& metadata = kRun) {
  EngineCheckpoint checkpoint = example_checkpoint();
  checkpoint.metadata = metadata;
  return checkpoint;
}

class MetadataTest : public ::testing::Test {
 protected:
  std::unique_ptr<CheckpointManager> manager(const std::string& directory) {
    return value_of(CheckpointManager::open(linux_file_system(), directory, options_));
  }
  std::string write(const Metadata& metadata = kRun) {
    return value_of(test::write_checkpoint(*manager(temporary_.path()), labelled(metadata)));
  }
  std::vector<CheckpointInfo> list() { return value_of(manager(temporary_.path())->list()); }

  test::TemporaryDirectory temporary_;
  CheckpointManagerOptions options_{.retention = {.keep = 2}};
};

TEST_F(MetadataTest, IsReadBackAloneAndWithTheState) {
  for (const bool sealed : {false, true}) {
    if (sealed)
      options_ = {.key = std::make_shared<const Key>(std::array<uint8_t, kKeyBytes>{1, 2, 3}), .encrypt = true};
    const Checkpoint checkpoint = value_of(open_checkpoint(linux_file_system(), write(), options_.key));
    EXPECT_EQ(value_of(checkpoint.read_metadata()), kRun);
    EXPECT_EQ(value_of(checkpoint.read_state()), labelled());
    EXPECT_EQ(list().back().metadata, kRun);
  }
}

// A value that is no text needs the newer section; older readers carry that along.
TEST_F(MetadataTest, HasValuesOfJson) {
  const std::vector<Section> sections = encode(labelled(kValues));
  EXPECT_EQ(sections.back().name, "metadata_json");
  EXPECT_FALSE(sections.back().required);
  EXPECT_TRUE(value_of(decode(sections)).carried.empty());
  const Checkpoint checkpoint = value_of(open_checkpoint(linux_file_system(), write(kValues)));
  EXPECT_EQ(value_of(checkpoint.read_metadata()), kValues);
  EXPECT_EQ(value_of(checkpoint.read_state()), labelled(kValues));
  EXPECT_EQ(list().back().metadata, kValues);
  EXPECT_EQ(encode(labelled()).back().name, "metadata");  // text alone is written as ever
  for (const char* json : {"", "nan", "[1,", "{\"a\":}", "1 2", "\"\\ud800\"", "[[[[[[[[[1]]]]]]]]]"}) {
    EXPECT_FAILS(check_metadata({{"bad", MetadataValue::json(json)}}), Code::kInvalidArgument, "\"bad\"");
    EXPECT_FAILS(decode_metadata(encode(labelled({{"bad", MetadataValue::json(json)}}))), Code::kCorruption, "\"bad\"");
  }
  EXPECT_SUCCEEDS(check_metadata({{"deep", MetadataValue::json("[[[[[[[[1]]]]]]]]")}}));
  EXPECT_FAILS(check_metadata({{"deeper", MetadataValue::json("[[[[[[[[[]]]]]]]]]")}}), Code::kInvalidArgument,
               "levels");
  // What one parser reads and another one refuses is no JSON, also if it is in a file.
  for (const std::string& json : {std::string("1\0 2", 4), std::string("\xEF\xBB\xBF[1]")})
    EXPECT_FAILS(MetadataValue::from_json(json), Code::kInvalidArgument, "no JSON");
  EXPECT_FAILS(check_metadata({{"long", MetadataValue::json(std::string(513, ' ') + "1")}}), Code::kInvalidArgument,
               "\"long\" has 514");
}

// Older readers carry it along, and a checkpoint without any has the bytes that it always had.
TEST_F(MetadataTest, IsASectionThatNobodyNeeds) {
  const std::vector<Section> with = encode(labelled());
  const std::vector<Section> without = encode(example_checkpoint());
  ASSERT_EQ(with.size(), without.size() + 1);
  EXPECT_EQ(with.back().name, "metadata");
  EXPECT_FALSE(with.back().required);
  EXPECT_EQ(std::vector<Section>(with.begin(), with.end() - 1), without);
  EXPECT_TRUE(value_of(decode(with)).carried.empty());
  EXPECT_TRUE(value_of(value_of(open_checkpoint(linux_file_system(), write({}))).read_metadata()).empty());
}

TEST_F(MetadataTest, ADamagedSectionIsAnErrorThatNamesIt) {
  std::vector<Section> sections = encode(labelled());
  for (size_t bytes = 0; bytes < sections.back().bytes.size(); ++bytes) {
    std::vector<Section> cut = sections;
    cut.back().bytes.resize(bytes);
    EXPECT_FAILS(decode_metadata(cut), Code::kCorruption, "metadata");
    const EngineCheckpoint woken = value_of(decode(cut));  // nothing is decided by it
    EXPECT_EQ(woken.state, labelled().state);
    EXPECT_EQ(woken.carried, std::vector<Section>{cut.back()});
  }
  sections.back().bytes[0] ^= 1;  // another version
  EXPECT_EQ(value_of(decode(sections)).carried, std::vector<Section>{sections.back()});
  const std::string path = write();
  const Checkpoint checkpoint = value_of(open_checkpoint(linux_file_system(), path));
  const SectionInfo& section = checkpoint.manifest().sections.back();
  ASSERT_EQ(section.name, "metadata");
  std::fstream file(path + "/STATE", std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(section.offset + section.stored_bytes / 2));
  file.put('\x7f');
  file.close();
  EXPECT_FAILS(checkpoint.read_metadata(), Code::kCorruption, "metadata");
  EXPECT_TRUE(list().back().readable);
  EXPECT_TRUE(list().back().metadata.empty());
  EXPECT_FALSE(value_of(verify(checkpoint)).problems.empty());
}

// A hostile manifest takes no memory.
TEST_F(MetadataTest, ASectionThatIsTooLargeIsNotRead) {
  Metadata large;
  for (int i = 0; i < 200; ++i) large[std::to_string(i)] = std::string(512, 'v');
  const Checkpoint checkpoint = value_of(open_checkpoint(linux_file_system(), write(large)));
  EXPECT_FAILS(checkpoint.read_metadata(), Code::kCorruption, "the section metadata has 1");
}

TEST_F(MetadataTest, OfASetIsThatOfItsCheckpoints) {
  std::vector<std::string> paths;
  for (const int rank : {0, 1}) {
    const std::string directory = rank_directory(temporary_.path(), rank, 2);
    paths.push_back(value_of(test::write_checkpoint(*manager(directory), labelled())));
  }
  const CommittedSet set = value_of(commit_set(linux_file_system(), temporary_.path(), options_, paths));
  EXPECT_EQ(value_of(open_set(linux_file_system(), set.path)).members, paths);
  EXPECT_EQ(list().back().metadata, kRun);
}

TEST(CheckMetadata, NamesWhatIsBeyondALimit) {
  EXPECT_SUCCEEDS(check_metadata(kRun));
  EXPECT_SUCCEEDS(check_metadata({{std::string(64, 'n'), std::string(512, 'v')}}));
  EXPECT_FAILS(check_metadata({{"", "lost"}}), Code::kInvalidArgument, "empty");
  for (const char* text :
       {"\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "a\xc3"}) {
    EXPECT_FAILS(check_metadata({{text, ""}}), Code::kInvalidArgument, "not UTF-8");
    EXPECT_FAILS(check_metadata({{"value", text}}), Code::kInvalidArgument, "not UTF-8");
    EXPECT_FAILS(decode_metadata(encode(labelled({{"value", text}}))), Code::kCorruption, "not UTF-8");
  }
  for (const char* text : {"é", "\xed\x9f\xbf", "\xee\x80\x80", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"})
    EXPECT_SUCCEEDS(check_metadata({{text, text}}));
  EXPECT_FAILS(check_metadata({{std::string(65, 'n'), ""}}), Code::kInvalidArgument, "65 bytes");
  EXPECT_FAILS(check_metadata({{"long", std::string(513, 'v')}}), Code::kInvalidArgument, "\"long\" has 513");
  Metadata many;
  for (int i = 0; i < 16; ++i) many[std::to_string(i)] = "";
  EXPECT_SUCCEEDS(check_metadata(many));
  many["16"] = "";
  EXPECT_FAILS(check_metadata(many), Code::kInvalidArgument, "17 pairs");
}

}  // namespace
}  // namespace torpor
