// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/checkpoint_manager.h"

#include <fstream>

#include "base/watched_file_system.h"
#include "checkpoint/verify.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/written_checkpoint.h"

namespace torpor {
namespace {

namespace fs = boost::filesystem;
using test::example_checkpoint;
using test::value_of;

class CheckpointManagerTest : public ::testing::Test {
 protected:
  std::unique_ptr<CheckpointManager> manager(int keep = 2) {
    return value_of(CheckpointManager::open(file_system_, temporary_.path(), {.retention = {.keep = keep}}));
  }
  std::string write() { return value_of(test::write_checkpoint(*manager())); }
  std::vector<std::string> names() {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(temporary_.path()))
      names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }
  static void damage(const std::string& path, size_t at) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(at));
    const char byte = static_cast<char>(file.get() ^ 0x10);
    file.seekp(static_cast<std::streamoff>(at));
    file.put(byte);
  }
  test::TemporaryDirectory temporary_;
  test::FaultyFileSystem file_system_;
};

TEST_F(CheckpointManagerTest, WhatIsWrittenIsReadBackAndWhole) {
  const std::string path = write();
  EXPECT_EQ(path, temporary_ / "g-000001");
  const Checkpoint checkpoint = value_of(open_checkpoint(file_system_, path));
  EXPECT_EQ(value_of(checkpoint.read_state()), example_checkpoint());
  EXPECT_TRUE(value_of(verify(checkpoint)).problems.empty());
  EXPECT_EQ(value_of(open_checkpoint(file_system_, temporary_.path())).path(), path);
  uint64_t on_disk = 0;
  for (const char* file : {"STATE", "refs-r0", "chunks-r0"}) on_disk += fs::file_size(fs::path(path) / file);
  EXPECT_EQ(checkpoint.manifest().total_bytes(), on_disk);
}

TEST_F(CheckpointManagerTest, EveryDamagedByteOfEveryFileIsFound) {
  const std::string path = write();
  for (const char* name : {"MANIFEST", "STATE", "refs-r0", "chunks-r0"}) {
    const std::string file = path + "/" + name;
    const size_t size = fs::file_size(file);
    size_t found = 0;
    size_t tried = 0;
    for (size_t at = 0; at<size; at += size> 4096 ? 37 : 1) {
      // Padding between chunks means nothing.
      if (std::string_view(name) == "chunks-r0" && (at % 4096 >= 1000 || (at < 4096 && at >= 20))) continue;
      damage(file, at);
      ++tried;
      const Result<Checkpoint> opened = open_checkpoint(file_system_, path);
      if (!opened || !value_of(verify(*opened)).problems.empty()) ++found;
      damage(file, at);
    }
    EXPECT_EQ(found, tried) << name;
    EXPECT_GT(tried, 50u);
  }
  EXPECT_TRUE(value_of(verify(value_of(open_checkpoint(file_system_, path)))).problems.empty());
}

TEST_F(CheckpointManagerTest, EveryTruncationIsFound) {
  const std::string path = write();
  for (const char* name : {"MANIFEST", "STATE", "refs-r0", "chunks-r0"}) {
    const std::string file = path + "/" + name;
    const size_t size = fs::file_size(file);
    fs::copy_file(file, temporary_ / "whole");
    for (const size_t cut : {size - 1, size / 2, size_t{0}}) {
      fs::resize_file(file, cut);
      const Result<Checkpoint> opened = open_checkpoint(file_system_, path);
      EXPECT_TRUE(!opened || !value_of(verify(*opened)).problems.empty()) << name << " cut to " << cut;
    }
    fs::remove(file);
    fs::rename(temporary_ / "whole", file);
  }
}

TEST_F(CheckpointManagerTest, AMissingFileOrCheckpointIsNotFound) {
  EXPECT_FAILS(open_checkpoint(file_system_, temporary_.path()), Code::kNotFound, "no checkpoint");
  EXPECT_FAILS(open_checkpoint(file_system_, temporary_ / "none"), Code::kNotFound);
  const std::string path = write();
  fs::remove(path + "/STATE");
  EXPECT_FAILS(value_of(open_checkpoint(file_system_, path)).read_state(), Code::kNotFound, "STATE");
}

TEST_F(CheckpointManagerTest, ANewCheckpointNeverTouchesAnOlderOne) {
  write();
  const std::string second = write();
  EXPECT_EQ(second, temporary_ / "g-000002");
  for (const CheckpointInfo& info : value_of(manager()->list())) EXPECT_TRUE(info.readable);
  EXPECT_EQ(names(), (std::vector<std::string>{"LOCK", "g-000001", "g-000002"}));
}

TEST_F(CheckpointManagerTest, OlderOnesGoOnlyAfterAWakeFromTheirSuccessor) {
  const auto write_keeping = [&](int keep) { (void)value_of(test::write_checkpoint(*manager(keep))); };
  write_keeping(1);
  ASSERT_SUCCEEDS(manager(1)->woken_from(1));
  for (int i = 0; i < 3; ++i) write_keeping(1);  // the last good one, the newest and the one before it
  EXPECT_EQ(names(), (std::vector<std::string>{"LOCK", "g-000001", "g-000003", "g-000004"}));
  ASSERT_SUCCEEDS(manager(1)->woken_from(3));
  EXPECT_EQ(names(), (std::vector<std::string>{"LOCK", "g-000003", "g-000004"}));
  ASSERT_SUCCEEDS(manager(2)->woken_from(4));
  EXPECT_EQ(names(), (std::vector<std::string>{"LOCK", "g-000003", "g-000004"}));
  ASSERT_SUCCEEDS(manager(1)->woken_from(4));
  EXPECT_EQ(names(), (std::vector<std::string>{"LOCK", "g-000004"}));
}

TEST_F(CheckpointManagerTest, AWakeIsMarkedWhileAnotherProcessWrites) {
  write();
  write();
  const auto lock = value_of(value_of(file_system_.open_directory(temporary_.path(), false))->lock("LOCK"));
  EXPECT_FAILS(manager(1)->woken_from(2), Code::kUnavailable, "older checkpoints were not removed");
  EXPECT_EQ(names(), (std::vector<std::string>{"LOCK", "g-000001", "g-000002"}));
  EXPECT_TRUE(value_of(manager()->list())[1].woken);
  EXPECT_FAILS(manager(1)->woken_from(3), Code::kNotFound, "g-000003 was not marked as woken");
}

// Whoever made the mark may have failed to make it durable.
TEST_F(CheckpointManagerTest, AMarkThatIsThereIsMadeDurableAgain) {
  write();
  ASSERT_SUCCEEDS(manager()->woken_from(1));
  int synced = 0;
  const auto watched = make_watched_file_system(file_system_, [&](std::string_view call, const std::string& name) {
    synced += call == "sync" && name.ends_with("g-000001") ? 1 : 0;
    return ok();
  });
  ASSERT_SUCCEEDS(value_of(CheckpointManager::open(*watched, temporary_.path(), {}))->woken_from(1));
  EXPECT_EQ(synced, 1);
}

TEST_F(CheckpointManagerTest, AnAbandonedCheckpointLeavesNothing) {
  {
    PendingCheckpoint pending = value_of(manager()->begin(0));
    ASSERT_SUCCEEDS(pending.write_state(example_checkpoint()));
  }
  EXPECT_EQ(names(), (std::vector<std::string>{"LOCK"}));
}

TEST_F(CheckpointManagerTest, OneWriterAtATime) {
  const PendingCheckpoint pending = value_of(manager()->begin(0));
  EXPECT_FAILS(manager()->begin(0), Code::kUnavailable);
}

TEST_F(CheckpointManagerTest, WhatDoesNotFitIsRefusedBeforeAnythingIsWritten) {
  EXPECT_FAILS(manager()->begin(UINT64_MAX / 2), Code::kResourceExhausted, "free");
  EXPECT_EQ(names(), (std::vector<std::string>{"LOCK"}));
}

TEST_F(CheckpointManagerTest, AFileOfAnotherLengthIsNotCommitted) {
  for (const char* name : {"chunks-r0", "refs-r0"}) {
    for (const bool longer : {false, true}) {
      PendingCheckpoint pending = value_of(manager()->begin(0));
      ASSERT_SUCCEEDS(pending.write_state(example_checkpoint()));
      ASSERT_SUCCEEDS(test::write_rank(pending, example_checkpoint().state.kv, 0));
      const fs::path file = fs::path(pending.staging_path()) / name;
      fs::resize_file(file, fs::file_size(file) + (longer ? 1 : -1));
      EXPECT_FAILS(pending.commit(), Code::kIo, name);
    }
  }
}

TEST_F(CheckpointManagerTest, ForeignEntriesOfTheDirectoryAreLeftAlone) {
  std::ofstream(temporary_ / "notes.txt") << "mine";
  fs::create_directory(temporary_ / "g-12");  // not how torpor writes a number
  fs::create_directory(temporary_ / "g-abc");
  write();
  ASSERT_SUCCEEDS(manager(1)->woken_from(1));
  EXPECT_EQ(names(), (std::vector<std::string>{"LOCK", "g-000001", "g-12", "g-abc", "notes.txt"}));
  EXPECT_EQ(value_of(manager()->list()).size(), 1u);
}

TEST_F(CheckpointManagerTest, OnlyWhatTorporLeftIsRemovedWhateverElseIsCalled) {
  const std::string pull = "s-pull-" + std::string(32, 'a');
  const std::vector<std::string> left = {"s-000001", "s-1234567", pull, "s-pull-answers", "t-g-000001"};
  const std::vector<std::string> foreign = {
      "s-1",      "s-0000001", "s-g-000001", "s-notes", "s-pull-aa", pull + "a", "s-pull-" + std::string(32, 'A'),
      "t-000001", "t-g-1",     "t-shirts"};
  std::vector<std::string> kept = {"LOCK", "s-000002", "s-000003", "s-notes.txt", "t-g-000002"};
  kept.insert(kept.end(), foreign.begin(), foreign.end());
  std::sort(kept.begin(), kept.end());
  std::ofstream(temporary_ / "s-notes.txt") << "mine";
  std::ofstream(temporary_ / "s-000002") << "mine";
  std::ofstream(temporary_ / "t-g-000002") << "mine";
  fs::create_directory_symlink(temporary_ / "t-shirts", temporary_ / "s-000003");
  for (const std::string& name : foreign) fs::create_directory(temporary_ / name);
  std::ofstream(temporary_ / "t-shirts/a") << "mine";
  for (const bool begins : {false, true}) {
    for (const std::string& name : left) {
      fs::create_directories(temporary_ / (name + "/below"));
      std::ofstream(temporary_ / (name + "/below/STATE")) << "half";
    }
    if (begins) {
      (void)value_of(manager()->begin(0));
    } else {
      EXPECT_EQ(value_of(manager()->collect(/*dry_run=*/true)), left);
      EXPECT_EQ(value_of(manager()->collect(/*dry_run=*/false)), left);
    }
    EXPECT_EQ(names(), kept);
    EXPECT_TRUE(fs::exists(temporary_ / "t-shirts/a"));
  }
}

TEST_F(CheckpointManagerTest, ADamagedOneIsListedWithItsProblem) {
  damage(write() + "/MANIFEST", 30);
  const auto infos = value_of(manager()->list());
  ASSERT_EQ(infos.size(), 1u);
  EXPECT_FALSE(infos[0].readable);
  EXPECT_FALSE(infos[0].problem.what.empty());
}

// Each call to the file system fails once, with each error: no half checkpoint is ever seen, and the next one is whole.
TEST_F(CheckpointManagerTest, WhereverAFileOperationFailsOldCheckpointsStayAndTheNextSucceeds) {
  write();
  for (const int native : {EIO, ENOSPC}) {
    for (const bool sticky : {false, true}) {
      for (uint64_t n = 1;; ++n) {
        SCOPED_TRACE(std::to_string(n) + " " + std::to_string(native));
        file_system_.plan.set(test::Fault::kError, n, native, sticky);
        const Result<std::string> written = test::write_checkpoint(*manager());
        const bool fired = file_system_.plan.fired();
        file_system_.plan.clear();
        for (const CheckpointInfo& info : value_of(manager()->list())) {
          EXPECT_TRUE(info.readable);
          EXPECT_TRUE(value_of(verify(value_of(open_checkpoint(file_system_, info.path)))).problems.empty());
        }
        EXPECT_GE(value_of(manager()->list()).size(), 1u);
        if (written) {
          ASSERT_SUCCEEDS(manager()->remove(value_of(open_checkpoint(file_system_, *written)).manifest().generation));
        }
        if (!fired) break;
        ASSERT_LT(n, 200u);
      }
    }
  }
  EXPECT_SUCCEEDS(test::write_checkpoint(*manager()));
}

}  // namespace
}  // namespace torpor
