// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/checkpoint_set.h"

#include <boost/filesystem.hpp>

#include "checkpoint/verify.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/written_checkpoint.h"

namespace torpor {
namespace {

namespace fs = boost::filesystem;
using test::value_of;

class CheckpointSetTest : public ::testing::Test {
 protected:
  std::string write_rank(int rank, int ranks = 2) {
    return value_of(test::write_checkpoint(
        *value_of(CheckpointManager::open(file_system_, rank_directory(temporary_.path(), rank, ranks), options_))));
  }
  std::vector<std::string> write_ranks() { return {write_rank(0), write_rank(1)}; }
  Result<CommittedSet> commit(const std::vector<std::string>& paths) {
    return commit_set(file_system_, temporary_.path(), options_, paths);
  }
  std::string write() {
    CommittedSet set = value_of(commit(write_ranks()));
    set.pending.retire_older();
    return set.path;
  }
  Result<CheckpointSet> open(const std::string& path) { return open_set(file_system_, path, options_.key); }

  test::TemporaryDirectory temporary_;
  test::FaultyFileSystem file_system_;
  CheckpointManagerOptions options_{.retention = {.keep = 2}};
};

TEST_F(CheckpointSetTest, NamesTheCheckpointOfEachRank) {
  const std::vector<std::string> paths = write_ranks();
  const std::string path = value_of(commit(paths)).path;
  EXPECT_EQ(path, temporary_ / "g-000001");
  for (const std::string& from : {path, temporary_.path()}) {
    const CheckpointSet set = value_of(open(from));
    EXPECT_EQ(set.members, paths);
    EXPECT_EQ(set.path, path);
    EXPECT_EQ(set.directory, temporary_.path());
    EXPECT_EQ(set.generation, 1u);
  }
}

TEST_F(CheckpointSetTest, ADirectoryMayBeWrittenInOtherWays) {
  const std::vector<std::string> paths = write_ranks();
  for (const std::string& directory :
       {temporary_ / "", temporary_ / "rank-0-of-2/..", fs::relative(temporary_.path(), fs::current_path()).string()}) {
    EXPECT_EQ(value_of(open(value_of(commit_set(file_system_, directory, options_, paths)).path)).members.size(), 2u)
        << directory;
  }
}

TEST_F(CheckpointSetTest, AMissingCheckpointIsNamed) {
  const std::string path = write();
  fs::remove_all(temporary_ / "rank-1-of-2/g-000001");
  EXPECT_FAILS(open(path), Code::kNotFound, "rank 1's checkpoint");
}

TEST_F(CheckpointSetTest, AnotherCheckpointInItsPlaceIsNamed) {
  const std::string path = write();
  const std::string ours = temporary_ / "rank-1-of-2/g-000001";
  fs::remove_all(ours);
  fs::rename(temporary_ / "rank-0-of-2/g-000001", ours);  // the other rank's
  write_rank(0);
  EXPECT_FAILS(open(path), Code::kIncompatible, "rank 0's checkpoint");
  fs::remove_all(temporary_ / "rank-0-of-2/g-000001");
  EXPECT_FAILS(open(path), Code::kNotFound, "rank 0's checkpoint");
}

TEST_F(CheckpointSetTest, ADamagedCheckpointOfARankIsNamed) {
  const std::string path = write();
  fs::resize_file(temporary_ / "rank-0-of-2/g-000001/MANIFEST", 100);
  EXPECT_FAILS(open(path), Code::kCorruption, "rank 0's checkpoint");
}

TEST_F(CheckpointSetTest, WhatHasNoSetIsNotFound) {
  write_ranks();
  EXPECT_FAILS(open(temporary_.path()), Code::kNotFound, "no checkpoint");
  const std::string path = write();
  write_ranks();  // a crash before their set
  EXPECT_EQ(value_of(open(temporary_.path())).path, path);
}

TEST_F(CheckpointSetTest, AWithdrawnSetIsGone) {
  CommittedSet set = value_of(commit(write_ranks()));
  ASSERT_SUCCEEDS(set.pending.withdraw());
  EXPECT_FAILS(open(temporary_.path()), Code::kNotFound, "no checkpoint");
}

TEST_F(CheckpointSetTest, OneIsWrittenAtATime) {
  const std::vector<std::string> paths = write_ranks();
  const CommittedSet set = value_of(commit(paths));
  EXPECT_FAILS(commit(paths), Code::kUnavailable);
}

TEST_F(CheckpointSetTest, CheckpointsThatLieElsewhereAreRefused) {
  const std::vector<std::string> paths = write_ranks();
  EXPECT_FAILS(commit({paths[1], paths[0]}), Code::kInvalidArgument, "rank-0-of-2");
  EXPECT_FAILS(commit({paths[0]}), Code::kInvalidArgument, "rank-0-of-1");
  EXPECT_FAILS(commit({paths[0], "/elsewhere/rank-1-of-2/g-000001"}), Code::kInvalidArgument, "rank 1");
  EXPECT_FAILS(open(temporary_.path()), Code::kNotFound);
}

TEST_F(CheckpointSetTest, ASetIsNoCheckpointOfAnEngineNorTheOtherWayRound) {
  const std::string path = write();
  const Checkpoint set = value_of(open_checkpoint(file_system_, path));
  EXPECT_FAILS(set.read_state(), Code::kIncompatible, "data parallel");
  EXPECT_TRUE(value_of(verify(set)).problems.empty());
  EXPECT_NE(value_of(verify(set)).hashes_not_checked.find("each rank"), std::string::npos);
  EXPECT_FAILS(open(temporary_ / "rank-0-of-2"), Code::kIncompatible, "one engine");
}

TEST_F(CheckpointSetTest, OfASetEachRankOpensItsOwn) {
  const std::vector<std::string> paths = write_ranks();
  ASSERT_SUCCEEDS(commit(paths));
  for (const int rank : {0, 1}) {
    const std::string& own = paths[static_cast<size_t>(rank)];
    EXPECT_EQ(value_of(open_checkpoint_of(file_system_, temporary_.path(), rank)).path(), own);
    EXPECT_EQ(value_of(open_checkpoint_of(file_system_, own, rank)).path(), own);  // of one engine: that
  }
  EXPECT_FAILS(open_checkpoint_of(file_system_, temporary_.path(), 2), Code::kIncompatible, "of 2 data parallel ranks");
}

TEST_F(CheckpointSetTest, IsSealedAsItsCheckpointsAre) {
  options_.key = std::make_shared<const Key>(std::array<uint8_t, kKeyBytes>{1, 2, 3});
  options_.encrypt = true;
  const std::string path = write();
  EXPECT_EQ(value_of(open(path)).members.size(), 2u);
  EXPECT_FAILS(open_set(file_system_, path), Code::kUnauthenticated);
}

TEST_F(CheckpointSetTest, AFailingFileCallLeavesTheSetBeforeOrTheNewOne) {
  const std::string before = write();
  const std::vector<std::string> paths = write_ranks();
  int failed = 0;
  bool fired = true;
  for (uint64_t call = 1; fired; ++call) {
    file_system_.plan.set(test::Fault::kError, call);
    Result<CommittedSet> set = commit(paths);
    fired = file_system_.plan.fired();
    file_system_.plan.clear();
    const std::string newest = value_of(open(temporary_.path())).path;
    EXPECT_EQ(newest, set ? set->path : before) << "call " << call;
    if (set) {
      ASSERT_SUCCEEDS(set->pending.withdraw());
    }
    failed += set ? 0 : 1;
  }
  EXPECT_GT(failed, 10);
}

TEST_F(CheckpointSetTest, ASetThatADiskKeepsAfterAFailedCommitIsNamed) {
  const std::string before = write();
  const std::vector<std::string> paths = write_ranks();
  int left = 0;
  for (uint64_t call = 1;; ++call) {
    SCOPED_TRACE(call);
    file_system_.plan.set(test::Fault::kError, call, EIO, /*all_after=*/true);
    const Result<CommittedSet> set = commit(paths);
    const bool fired = file_system_.plan.fired();
    file_system_.plan.clear();
    if (set || !fired) {
      ASSERT_SUCCEEDS(set);
      break;
    }
    const std::string newest = value_of(open(temporary_.path())).path;
    if (newest == before) continue;
    ++left;
    EXPECT_NE(set.error().what.find("a set may be left"), std::string::npos) << set.error().to_string();
    fs::remove_all(newest);
  }
  EXPECT_GT(left, 0);  // else the test would show nothing
}

}  // namespace
}  // namespace torpor
