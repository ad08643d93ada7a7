// SPDX-License-Identifier: Apache-2.0
// The format over time and under lock and key: kept checkpoints are read, other versions refused, unknown sections kept
// or refused, seals hold.
#include <cmath>
#include <filesystem>
#include <fstream>

#include <fmt/core.h>

#include "checkpoint/checkpoint_manager.h"
#include "checkpoint/state_sections.h"
#include "checkpoint/verify.h"
#include "tests/support/golden.h"
#include "tests/support/model_file_system.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/written_checkpoint.h"

namespace torpor {
namespace {

using test::example_checkpoint;
using test::value_of;

std::shared_ptr<const Key> key_of(uint8_t byte) {
  std::array<uint8_t, kKeyBytes> bytes{};
  bytes.fill(byte);
  return std::make_shared<const Key>(bytes);
}

TEST(Format, TheGoldenCheckpointIsReadWholeAndVerified) {
  const test::TemporaryDirectory temporary;
  const std::string copy = test::copy_of_golden("v4-unsealed", temporary / "store") + "/g-000001";
  const Checkpoint checkpoint = value_of(open_checkpoint(linux_file_system(), copy));
  EXPECT_EQ(checkpoint.manifest().format_version, 4u);
  EXPECT_EQ(checkpoint.manifest().creator, "torpor 0.1.0");
  EXPECT_EQ(std::floor(checkpoint.manifest().created_unix_seconds), 1795691864);
  EXPECT_EQ(value_of(checkpoint.read_state()), example_checkpoint());
  const Verification found = value_of(verify(checkpoint));
  EXPECT_TRUE(found.problems.empty());
  EXPECT_EQ(found.chunks, 4u);
  EXPECT_FAILS(open_checkpoint(linux_file_system(), copy, key_of(1)), Code::kUnauthenticated, "without one");
}

// How it was written: TORPOR_GOLDEN_INTO=DIR checkpoint_test --gtest_also_run_disabled_tests
// --gtest_filter='Format.*IsWritten'
TEST(Format, DISABLED_TheGoldenCheckpointIsWritten) {
  const char* const into = std::getenv("TORPOR_GOLDEN_INTO");
  ASSERT_NE(into, nullptr) << "it says where";
  ASSERT_SUCCEEDS(test::write_checkpoint(*value_of(CheckpointManager::open(linux_file_system(), into, {}))));
}

TEST(Format, OtherVersionsAreRefusedByTheirNumber) {
  const test::TemporaryDirectory temporary;
  const std::string copy = test::copy_of_golden("v4-unsealed", temporary / "store") + "/g-000001";
  for (const uint32_t version : {0u, kOldestFormatVersion - 1, kFormatVersion + 1}) {
    std::fstream file(copy + "/MANIFEST", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(8);  // behind the magic
    file.write(reinterpret_cast<const char*>(&version), sizeof version);
    file.close();
    const std::string refused = fmt::format("format version {}, this torpor reads 3 to 4", version);
    for (const auto& key : {std::shared_ptr<const Key>(), key_of(1)}) {
      const auto opened = open_checkpoint(linux_file_system(), copy, key);
      ASSERT_TRUE(test::failed_with(opened, Code::kIncompatible, refused));
      EXPECT_EQ(opened.error().next_step, "use the version of torpor that wrote it");
    }
  }
}

TEST(Sections, AnUnknownOneIsCarriedOrRefusedByItsOwnWord) {
  std::vector<Section> sections = encode(example_checkpoint());
  sections.push_back({"from_the_future", {1, 2, 3}, false});
  EngineCheckpoint carried = value_of(decode(sections));
  EXPECT_EQ(carried.carried, (std::vector<Section>{{"from_the_future", {1, 2, 3}, false}}));
  EXPECT_EQ(encode(carried), sections);
  sections.back().required = true;
  EXPECT_FAILS(decode(sections), Code::kIncompatible, "from_the_future");
}

class Sealed : public ::testing::TestWithParam<bool> {
 protected:
  CheckpointManagerOptions options(uint8_t key) const { return {.key = key_of(key), .encrypt = GetParam()}; }
  std::unique_ptr<CheckpointManager> manager(CheckpointManagerOptions options) {
    return value_of(CheckpointManager::open(system_, "/store", std::move(options)));
  }
  test::ModelFileSystem system_;
};
INSTANTIATE_TEST_SUITE_P(Protections, Sealed, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Encrypted" : "Authenticated"; });

TEST_P(Sealed, IsReadWithItsKeyOnly) {
  ASSERT_SUCCEEDS(test::write_checkpoint(*manager(options(1))));
  const Checkpoint checkpoint = value_of(open_checkpoint(system_, "/store", key_of(1)));
  EXPECT_EQ(checkpoint.manifest().protection, GetParam() ? Protection::kEncrypted : Protection::kAuthenticated);
  EXPECT_EQ(value_of(checkpoint.read_state()), example_checkpoint());
  EXPECT_TRUE(value_of(verify(checkpoint)).problems.empty());
  EXPECT_FAILS(open_checkpoint(system_, "/store", key_of(2)), Code::kUnauthenticated, "not the one");
  EXPECT_FAILS(open_checkpoint(system_, "/store"), Code::kUnauthenticated, "key file");
}

TEST_P(Sealed, OneWithoutASealIsNotTakenForOneWith) {
  ASSERT_SUCCEEDS(test::write_checkpoint(*manager({})));
  EXPECT_FAILS(open_checkpoint(system_, "/store", key_of(1)), Code::kUnauthenticated, "without one");
}

// A whole, sealed file of another checkpoint under the same key is not of this one.
TEST_P(Sealed, FilesOfAnotherCheckpointOfTheSameKeyAreRefused) {
  CheckpointManagerOptions many = options(1);
  many.retention.keep = 9;
  ASSERT_SUCCEEDS(test::write_checkpoint(*manager(many)));
  EngineCheckpoint other = example_checkpoint();
  other.state.scheduler.requests[0].priority = 5;
  ASSERT_SUCCEEDS(test::write_checkpoint(*manager(many), other));
  const auto bytes = [&](const std::string& path) -> Bytes& {
    return system_.disk()[static_cast<size_t>(system_.find(path))].bytes;
  };
  for (const char* name : {"STATE", "refs-r0", "chunks-r0"}) {
    const Bytes whole = bytes("/store/g-000002/" + std::string(name));
    const Bytes theirs = bytes("/store/g-000001/" + std::string(name));
    if (whole == theirs) continue;  // the same chunks in the clear
    bytes("/store/g-000002/" + std::string(name)) = theirs;
    const Checkpoint checkpoint = value_of(open_checkpoint(system_, "/store/g-000002", key_of(1)));
    EXPECT_FALSE(value_of(verify(checkpoint)).problems.empty()) << name;
    bytes("/store/g-000002/" + std::string(name)) = whole;
  }
}

TEST(KeyFile, IsCheckedBeforeItIsUsed) {
  const test::TemporaryDirectory temporary;
  const auto write = [&](const std::string& text, std::filesystem::perms perms) {
    const std::string path = temporary / "key";
    std::filesystem::remove(path);
    FILE* file = std::fopen(path.c_str(), "wb");
    std::fwrite(text.data(), 1, text.size(), file);
    std::fclose(file);
    std::filesystem::permissions(path, perms);
    return path;
  };
  const auto own = std::filesystem::perms::owner_read | std::filesystem::perms::owner_write;
  EXPECT_SUCCEEDS(Key::read_file(write(std::string(32, '\x01'), own)));
  const Key hexadecimal = value_of(Key::read_file(write(std::string(64, '1') + "\n", own)));
  EXPECT_EQ(hexadecimal.bytes()[0], 0x11);
  EXPECT_FAILS(Key::read_file(write(std::string(31, 'x'), own)), Code::kInvalidArgument, "32 bytes");
  EXPECT_FAILS(Key::read_file(write(std::string(64, 'z'), own)), Code::kInvalidArgument, "hexadecimal");
  EXPECT_FAILS(Key::read_file(write(std::string(32, 'x'), own | std::filesystem::perms::group_read)),
               Code::kInvalidArgument, "others");
  EXPECT_FAILS(Key::read_file(temporary / "none"), Code::kNotFound, "none");
}

}  // namespace
}  // namespace torpor
