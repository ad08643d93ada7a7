// SPDX-License-Identifier: Apache-2.0
#include "base/progress_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "base/units.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor {
namespace {

using test::value_of;

class StillClock final : public Clock {
 public:
  std::chrono::nanoseconds now() const override { return time; }
  double unix_seconds() const override { return 0; }
  std::chrono::nanoseconds time{1'000'000'000};
};

class ProgressFileTest : public ::testing::Test {
 protected:
  test::TemporaryDirectory temporary_;
  const std::string path_ = temporary_ / "progress";
  StillClock clock_;
};

TEST_F(ProgressFileTest, WhoWatchesSeesWhatAllThatOpenedItMove) {
  const auto watcher = value_of(ProgressFile::create(path_, clock_));
  EXPECT_EQ(watcher->phase(), 0);
  EXPECT_EQ(watcher->read().bytes_total, 0u);
  EXPECT_EQ(watcher->read().seconds, 0);
  const auto controller = value_of(ProgressFile::open(path_, clock_));
  controller->begin_phase(4);
  constexpr int kRanks = 4;
  constexpr int kBatches = 1000;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&] {
      const auto own = value_of(ProgressFile::open(path_, clock_));
      own->expect(2 * kBatches);
      for (int i = 0; i < kBatches; ++i) own->moved(1);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  clock_.time += std::chrono::seconds(10);
  const Progress progress = watcher->read();
  EXPECT_EQ(watcher->phase(), 4);
  EXPECT_EQ(progress.bytes_total, 2u * kRanks * kBatches);
  EXPECT_EQ(progress.bytes_done, uint64_t{kRanks} * kBatches);
  EXPECT_DOUBLE_EQ(progress.seconds, 10);
  EXPECT_DOUBLE_EQ(progress.seconds_left(), 10);
}

TEST_F(ProgressFileTest, WhoWatchesCancelsAllOthers) {
  const auto watcher = value_of(ProgressFile::create(path_));
  const auto worker = value_of(ProgressFile::open(path_));
  EXPECT_SUCCEEDS(worker->check());
  watcher->cancel();
  EXPECT_TRUE(worker->cancelled());
  EXPECT_FAILS(worker->check(), Code::kAborted, "cancelled");
}

TEST_F(ProgressFileTest, WhatIsNotSuchAFileIsRefusedByName) {
  EXPECT_FAILS(ProgressFile::open(path_), Code::kNotFound, path_);
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  EXPECT_FAILS(ProgressFile::open(path_), Code::kFailedPrecondition, path_);
  EXPECT_FAILS(ProgressFile::create(path_), Code::kIo, path_);  // something is there
  ASSERT_EQ(::unlink(path_.c_str()), 0);
  for (const uint64_t size : {uint64_t{0}, kPage - 1, kPage, kPage + 1}) {  // of the right size: without its mark
    const int fd = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    ASSERT_EQ(::ftruncate(fd, static_cast<off_t>(size)), 0);
    ::close(fd);
    EXPECT_FAILS(ProgressFile::open(path_), Code::kCorruption, path_);
  }
  const std::string link = temporary_ / "link";
  ASSERT_EQ(::symlink(path_.c_str(), link.c_str()), 0);
  EXPECT_FAILS(ProgressFile::open(link), Code::kIo, link);
}

TEST_F(ProgressFileTest, AnOperationWithoutAFileIsNotWatched) {
  EXPECT_EQ(ProgressFile::of_caller(""), nullptr);
  EXPECT_EQ(ProgressFile::of_caller(path_), nullptr);
  const auto watcher = value_of(ProgressFile::create(path_));
  struct stat status {};
  ASSERT_EQ(::stat(path_.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  EXPECT_NE(ProgressFile::of_caller(path_), nullptr);
}

}  // namespace
}  // namespace torpor
