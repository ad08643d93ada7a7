// SPDX-License-Identifier: Apache-2.0
// Incremental checkpoints: what is linked, what is written, and that each is whole by itself.
#include "checkpoint/rank_writer.h"

#include <filesystem>
#include <random>

#include <fmt/core.h>

#include "base/units.h"
#include "base/watched_file_system.h"
#include "checkpoint/checkpoint_manager.h"
#include "checkpoint/refs_codec.h"
#include "checkpoint/verify.h"
#include "tests/support/model_file_system.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/written_checkpoint.h"

namespace torpor {
namespace {

using test::example_checkpoint;
using test::value_of;

ChunkKey block_key(uint64_t block) { return {.kind = ChunkKind::kKvBlock, .tag = "kv_cache", .index = block}; }

// Of each block a number from which its bytes follow. The state names blocks 1 to 4.
using Content = std::vector<uint64_t>;
Content content_of(size_t blocks) {
  Content content(blocks);
  for (size_t i = 0; i < blocks; ++i) content[i] = i * 1000;
  return content;
}

class RankWriterTest : public ::testing::Test {
 protected:
  using Options = CheckpointManagerOptions;
  static Options incremental(int keep = 1000) { return {.retention = {.keep = keep}, .incremental = true}; }
  PendingCheckpoint begin(FileSystem& file_system, const Options& options) {
    PendingCheckpoint pending = value_of(value_of(CheckpointManager::open(file_system, "/store", options))->begin(0));
    must(pending.write_state(example_checkpoint()));
    return pending;
  }
  PendingCheckpoint begin() { return begin(system_, incremental()); }
  // Puts those blocks of `content` that are named, all if none are.
  std::vector<SavedChunk> put(RankWriter& writer, const Content& content, std::vector<size_t> blocks = {}) {
    if (blocks.empty()) {
      for (size_t i = 0; i < content.size(); ++i) blocks.push_back(i);
    }
    std::vector<SavedChunk> records;
    for (const size_t block : blocks) {
      std::vector<std::byte> bytes(block_bytes_);
      std::mt19937_64 random(content[block]);
      for (size_t at = 0; at < bytes.size(); at += 8) {
        const uint64_t word = random();
        std::memcpy(bytes.data() + at, &word, 8);
      }
      SavedChunk& record =
          records.emplace_back(SavedChunk{.key = block_key(block), .bytes = bytes.size(), .digest = digest_of(bytes)});
      RecordPart part{&record, bytes, ok()};
      writer.put({&part, 1});
      must(std::move(part.status));
    }
    return records;
  }
  // Ends the checkpoint; its path.
  std::string commit(PendingCheckpoint& pending, RankWriter& writer, std::vector<SavedChunk> records,
                     const Content& content) {
    for (const size_t place : writer.sparse(records))
      records[place] = put(writer, content, {records[place].key.index}).front();
    pending.add_rank(value_of(writer.write_refs(records)));
    std::string path = value_of(pending.commit());
    pending.retire_older();
    return path;
  }
  std::string write(const Content& content, FileSystem& file_system, const Options& options) {
    PendingCheckpoint pending = begin(file_system, options);
    const auto writer = value_of(pending.create_rank(0));
    return commit(pending, *writer, put(*writer, content), content);
  }
  std::string write(const Content& content) { return write(content, system_, incremental()); }

  static void must(Status status) { ASSERT_SUCCEEDS(status); }
  void expect_whole(const std::string& path, const std::shared_ptr<const Key>& key = nullptr) {
    const Verification found = value_of(verify(value_of(open_checkpoint(system_, path, key))));
    EXPECT_TRUE(found.problems.empty()) << path << ": " << found.problems[0].to_string();
  }
  RankSummary summary_in(const std::string& path) {
    return value_of(open_checkpoint(system_, path)).manifest().ranks.at(0);
  }
  Bytes& bytes(const std::string& path) { return system_.disk()[static_cast<size_t>(system_.find(path))].bytes; }
  uint64_t written_bytes() const {
    uint64_t written = 0;
    for (const test::ModelChange& change : system_.record) written += change.bytes.size();
    return written;
  }
  // Refuses links as file systems do.
  std::unique_ptr<FileSystem> without_links(int native) {
    return make_watched_file_system(system_, [native](const char* call, const std::string& name) -> Status {
      if (std::string_view(call) == "link_new") return system_error(native, "cannot link " + name);
      return ok();
    });
  }
  size_t block_bytes_ = kPage;
  test::ModelFileSystem system_;
};

TEST_F(RankWriterTest, WhatTheNewestOneHasIsLinkedAndNotWritten) {
  const Content content = content_of(6);
  for (int i = 0; i < 3; ++i) write(content);
  const RankSummary third = summary_in("/store/g-000003");
  ASSERT_EQ(third.files.size(), 2u);
  EXPECT_EQ(third.files[0].bytes, kPage);  // its header
  EXPECT_EQ(third.files[1].id, value_of(open_checkpoint(system_, "/store/g-000001")).manifest().id);
  EXPECT_EQ(system_.find("/store/g-000003/" + third.files[1].name), system_.find("/store/g-000001/chunks-r0"));
  EXPECT_EQ(third.tags.at("kv_cache"),
            (RecordSums{.records = 6, .bytes = 6 * kPage, .stored_bytes = 6 * kPage, .linked_bytes = 6 * kPage}));
  expect_whole("/store/g-000003");
}

TEST_F(RankWriterTest, WhatChangedIsWrittenAgain) {
  Content content = content_of(6);
  write(content);
  content[1] = content[4] = 7;
  write(content);
  content[4] = 8;
  const std::string path = write(content);
  const RankSummary third = summary_in(path);
  ASSERT_EQ(third.files.size(), 3u);
  EXPECT_EQ(third.own_bytes(), 2 * kPage);
  expect_whole(path);
}

TEST_F(RankWriterTest, ACheckpointThatSharesNineteenTwentiethsWritesAtMostSixPercent) {
  block_bytes_ = 32 * kKiB;
  Content content = content_of(400);
  write(content);
  const uint64_t whole = written_bytes();
  for (int round = 1; round <= 3; ++round) {
    for (size_t i = 0; i < content.size() / 20; ++i) content[i * 20 + static_cast<size_t>(round)] = 10'000 + i;
    system_.record.clear();
    const std::string path = write(content);
    const double share = static_cast<double>(written_bytes()) / static_cast<double>(whole);
    std::printf("bytes written by checkpoint %d that shares 95 %%: %.2f %%\n", round + 1, 100 * share);
    EXPECT_LE(share, 0.06);
    EXPECT_GE(share, 0.05);
    expect_whole(path);
  }
}

TEST_F(RankWriterTest, WhatIsKnownToBeUnchangedIsTakenOverWithoutBeingRead) {
  Content content = content_of(6);
  write(content);
  content[2] = 9;
  PendingCheckpoint pending = begin();
  const auto writer = value_of(pending.create_rank(0));
  std::vector<SavedChunk> records = put(*writer, content, {2});
  for (const uint64_t block : {0, 1, 3, 4, 5}) {
    ASSERT_NE(writer->base_record(block_key(block)), nullptr);
    records.push_back(value_of(writer->take_over(block_key(block))));
  }
  EXPECT_EQ(writer->base_record(block_key(6)), nullptr);
  EXPECT_FAILS(writer->take_over(block_key(6)), Code::kNotFound, "kv_cache block 6");
  const std::string path = commit(pending, *writer, records, content);
  EXPECT_EQ(summary_in(path).own_bytes(), 2 * kPage);
  expect_whole(path);
  EXPECT_EQ(value_of(value_of(open_checkpoint(system_, path)).refs(summary_in(path))).records[3].key, block_key(3));
}

TEST_F(RankWriterTest, OlderOnesGoAndNewerOnesStayWhole) {
  Content content = content_of(6);
  for (uint64_t i = 0; i < 3; ++i) {
    content[i] = i + 50;
    write(content);
  }
  const auto manager = value_of(CheckpointManager::open(system_, "/store", incremental()));
  for (const uint64_t generation : {1, 2}) {
    ASSERT_SUCCEEDS(manager->remove(generation));
    expect_whole("/store/g-000003");
  }
  EXPECT_EQ(summary_in("/store/g-000003").files.size(), 3u);
  expect_whole(write(content));
}

TEST_F(RankWriterTest, ACopyOfItsDirectoryAloneIsWhole) {
  const test::TemporaryDirectory temporary;
  Content content = content_of(6);
  std::string path;
  for (uint64_t i = 0; i < 3; ++i) {
    content[i] = i + 50;
    const auto manager = value_of(CheckpointManager::open(linux_file_system(), temporary / "store", incremental()));
    PendingCheckpoint pending = value_of(manager->begin(0));
    ASSERT_SUCCEEDS(pending.write_state(example_checkpoint()));
    const auto writer = value_of(pending.create_rank(0));
    path = commit(pending, *writer, put(*writer, content), content);
  }
  std::filesystem::copy(path, temporary / "copy", std::filesystem::copy_options::recursive);
  std::filesystem::permissions(temporary / "copy", std::filesystem::perms::owner_all);
  std::filesystem::remove_all(temporary / "store");
  const Checkpoint copy = value_of(open_checkpoint(linux_file_system(), temporary / "copy"));
  EXPECT_EQ(copy.manifest().ranks[0].files.size(), 3u);
  EXPECT_TRUE(value_of(verify(copy)).problems.empty());
}

TEST_F(RankWriterTest, WhereLinksAreRefusedEverythingIsWritten) {
  const Content content = content_of(6);
  write(content);
  for (const int native : {EPERM, EXDEV, EMLINK, EOPNOTSUPP}) {
    const auto file_system = without_links(native);
    PendingCheckpoint pending = begin(*file_system, incremental());
    const auto writer = value_of(pending.create_rank(0));
    for (const uint64_t block : {0, 5}) {
      EXPECT_EQ(writer->base_record(block_key(block)), nullptr);
      EXPECT_FAILS(writer->take_over(block_key(block)), Code::kNotFound, "can be linked");
    }
    const std::vector<SavedChunk> records = put(*writer, content);
    const std::string path = commit(pending, *writer, records, content);
    EXPECT_EQ(summary_in(path).files.size(), 1u);
    EXPECT_EQ(summary_in(path).own_bytes(), 7 * kPage);
    expect_whole(path);
  }
}

// Nothing of the one before is read: where it is damaged, the new one has what memory has, or the same damage.
TEST_F(RankWriterTest, ADamagedOneBeforeItFailsNoSave) {
  Content content = content_of(6);
  write(content);
  bytes("/store/g-000001/chunks-r0")[2 * kPage] ^= 1;  // block 1
  for (size_t i = 2; i < 6; ++i) content[i] = i + 70;  // so that its file is hardly used any more
  const std::string path = write(content);
  EXPECT_EQ(summary_in(path).files.size(), 1u);
  expect_whole(path);
  PendingCheckpoint pending = begin();
  const auto writer = value_of(pending.create_rank(0));
  bytes(path + "/chunks-r0")[writer->base_record(block_key(1))->offset] ^= 1;
  std::vector<SavedChunk> records;
  for (const uint64_t block : {0, 1, 2, 3, 4, 5}) records.push_back(value_of(writer->take_over(block_key(block))));
  const std::string linked = commit(pending, *writer, records, content);
  const Verification found = value_of(verify(value_of(open_checkpoint(system_, linked))));
  ASSERT_EQ(found.problems.size(), 1u);
  EXPECT_NE(found.problems[0].to_string().find("kv_cache block 1"), std::string::npos) << found.problems[0].to_string();
}

// A link holds its whole file, so files that are hardly used any more must go.
TEST_F(RankWriterTest, ChangesWithoutEndDoNotKeepEverything) {
  uint64_t most_stored = 0;
  uint64_t written = 0;
  Content content = content_of(40);
  std::mt19937_64 random(3);
  constexpr int kRounds = 300;
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < 8; ++i) content[random() % content.size()] = random();
    const RankSummary saved = summary_in(write(content, system_, incremental(1)));
    std::set<int> nodes;
    uint64_t stored = 0;
    for (const CheckpointInfo& info : value_of(value_of(CheckpointManager::open(system_, "/store"))->list())) {
      for (const LinkedFile& file : info.manifest.ranks[0].files) {
        const int node = system_.find(info.path + "/" + file.name);
        if (nodes.insert(node).second) stored += system_.disk()[static_cast<size_t>(node)].bytes.size();
      }
    }
    most_stored = std::max(most_stored, stored);
    written += saved.own_bytes();
    const RecordSums& sums = saved.tags.at("kv_cache");
    uint64_t held = 0;
    for (size_t i = 1; i < saved.files.size(); ++i) held += saved.files[i].bytes;
    ASSERT_LE(held, 2 * sums.linked_bytes + 1);
  }
  // The newest and the one before it are kept, which share most of their files.
  EXPECT_LE(most_stored, 3 * 40 * kPage);
  EXPECT_LE(written, kRounds * 20 * kPage);  // half of them all; what changed is a fifth
  expect_whole("/store/g-000300");
}

TEST_F(RankWriterTest, FilesDoNotBecomeMoreAndMore) {
  Content content = content_of(200);
  size_t most = 0;
  for (uint64_t round = 0; round < 90; ++round) {
    content[round] = 5'000 + round;
    const std::string path = write(content, system_, incremental(1));
    most = std::max(most, summary_in(path).files.size());
    if (round % 30 == 29) expect_whole(path);
  }
  EXPECT_EQ(most, 65u);  // 64 links and its own
}

TEST_F(RankWriterTest, SealsOfAllFilesHold) {
  for (const bool encrypt : {false, true}) {
    std::array<uint8_t, kKeyBytes> secret{};
    secret.fill(encrypt ? 2 : 1);
    Options options = incremental();
    options.key = std::make_shared<const Key>(secret);
    options.encrypt = encrypt;
    options.compression = {.level = 1};
    Content content = content_of(6);
    std::string path;
    for (uint64_t i = 0; i < 3; ++i) {
      content[i] = i + 50;
      path = write(content, system_, options);
    }
    const Checkpoint third = value_of(open_checkpoint(system_, path, options.key));
    ASSERT_EQ(third.manifest().ranks[0].files.size(), 3u);  // nothing of the one with the other seal
    expect_whole(path, options.key);
    Bytes& linked = bytes(path + "/" + third.manifest().ranks[0].files[1].name);
    linked[4 * kPage] ^= 1;
    EXPECT_FALSE(value_of(verify(third)).problems.empty());
  }
}

TEST_F(RankWriterTest, ABaseThatCannotBeReadIsNone) {
  const Content content = content_of(6);
  write(content);
  bytes("/store/g-000001/refs-r0")[70] ^= 1;
  EXPECT_EQ(summary_in(write(content)).files.size(), 1u);
  bytes("/store/g-000002/chunks-r0").push_back(0);  // another length than its refs say
  const std::string path = write(content);
  EXPECT_EQ(summary_in(path).files.size(), 1u);
  expect_whole(path);
  bytes(path + "/MANIFEST")[130] ^= 1;
  expect_whole(write(content));
}

TEST_F(RankWriterTest, ARankThatTheBaseDoesNotHaveWritesAll) {
  write(content_of(6));
  PendingCheckpoint pending = begin();
  for (const int32_t rank : {0, 1}) {
    const auto writer = value_of(pending.create_rank(rank));
    std::vector<SavedChunk> records = put(*writer, content_of(6));
    pending.add_rank(value_of(writer->write_refs(records)));
  }
  const std::string path = value_of(pending.commit());
  const Manifest manifest = value_of(open_checkpoint(system_, path)).manifest();
  EXPECT_EQ(manifest.ranks[0].files.size(), 2u);
  EXPECT_EQ(manifest.ranks[1].files.size(), 1u);
  expect_whole(path);
}

}  // namespace
}  // namespace torpor
