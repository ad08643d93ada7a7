// SPDX-License-Identifier: Apache-2.0
#include "console/event_files.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/core.h>

#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor::console {
namespace {

using test::value_of;

class EventFiles : public testing::Test {
 protected:
  // A process that tells so many events and is killed.
  pid_t killed(const std::string& role, uint64_t events, int32_t rank = 0) const {
    const pid_t child = ::fork();
    if (child == 0) {
      const auto ring = begin_events(directory_, role, rank, system_clock(), 64);
      for (uint64_t i = 1; ring && i <= events; ++i)
        (void)(*ring)->record({.type = EventType::kStep, .a = i}, system_clock().now().count());
      (void)::kill(::getpid(), SIGKILL);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return child;
  }
  std::vector<SourceEvents> read() const { return value_of(read_events(linux_file_system(), directory_)); }
  const test::TemporaryDirectory temporary_{"/dev/shm"};
  const std::string directory_ = temporary_ / "events";
};

TEST_F(EventFiles, EachProcessHasItsOwnAndLastWordsStay) {
  const auto here = value_of(begin_events(directory_, "core", 0, system_clock(), 64));
  const auto other = value_of(begin_events(directory_, "core", 0, system_clock(), 64));  // another engine
  (void)here->record({.type = EventType::kStep}, 0);
  const pid_t child = killed("rank", 3, 1);
  const std::vector<SourceEvents> found = read();
  ASSERT_EQ(found.size(), 3u);
  EXPECT_TRUE(found[0].alive && found[1].alive);
  EXPECT_FALSE(found[2].alive);
  EXPECT_EQ(found[2].source.pid, child);
  EXPECT_EQ(found[2].source.rank, 1);
  EXPECT_EQ(found[2].events.size(), 3u);
  EXPECT_EQ(found[0].events.size() + found[1].events.size(), 1u);
}

TEST_F(EventFiles, OfKilledProcessesTheNewestFewStay) {
  pid_t last = 0;
  for (int i = 0; i < 8; ++i) last = killed("core", 1);
  const auto here = value_of(begin_events(directory_, "core", 0, system_clock(), 64));
  const std::vector<SourceEvents> found = read();
  ASSERT_EQ(found.size(), 5u);
  EXPECT_EQ(found[1].source.pid, last);
}

TEST_F(EventFiles, TheDirectoryIsTheUsersAlone) {
  const auto ring = value_of(begin_events(directory_, "core", 0, system_clock(), 64));
  struct stat status {};
  ASSERT_EQ(::stat(directory_.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0700u);
  ASSERT_EQ(::chmod(directory_.c_str(), 0755), 0);
  EXPECT_FAILS(begin_events(directory_, "core", 0, system_clock(), 64), Code::kFailedPrecondition, "this user alone");
  ASSERT_EQ(::chmod(directory_.c_str(), 0700), 0);
  ASSERT_EQ(::symlink(directory_.c_str(), (directory_ + "-link").c_str()), 0);
  EXPECT_FAILS(begin_events(directory_ + "-link", "core", 0, system_clock(), 64), Code::kFailedPrecondition);
}

TEST_F(EventFiles, WhereThereIsNothingThatIsSaid) {
  EXPECT_FAILS(read_events(linux_file_system(), directory_), Code::kNotFound);
  ASSERT_EQ(::mkdir(directory_.c_str(), 0700), 0);
  EXPECT_FAILS(read_events(linux_file_system(), directory_), Code::kNotFound, "no events");
}

TEST_F(EventFiles, AFollowerHasAllOfWhatComesAndOfWhoComes) {
  const auto first = value_of(begin_events(directory_, "core", 0, system_clock(), 64));
  (void)first->record({.type = EventType::kStep}, 0);
  EventFollower follower(directory_, true);
  EXPECT_EQ(value_of(follower.poll()).at(0).events.size(), 0u);
  (void)first->record({.type = EventType::kStep}, 0);
  EXPECT_EQ(value_of(follower.poll()).at(0).events.size(), 1u);
  (void)killed("rank", 5);
  const std::vector<SourceEvents> news = value_of(follower.poll());
  ASSERT_EQ(news.size(), 2u);
  EXPECT_EQ(news[0].events.size(), 0u);
  EXPECT_EQ(news[1].events.size(), 5u);
  EXPECT_EQ(value_of(follower.poll()).at(1).events.size(), 0u);
  EXPECT_TRUE(follower.any_alive());
}

// Of several processes by time, of one in its own order.
TEST(MergedEvents, AreByTimeAndKeepTheOrderOfTheirSource) {
  std::vector<SourceEvents> sources(2);
  sources[1].source.wall_ns = 3;  // its clock is 3 ahead
  for (const int64_t time : {10, 20, 15, 30}) sources[0].events.push_back({.time = time, .type = EventType::kStep});
  for (const int64_t time : {9, 18, 29}) sources[1].events.push_back({.time = time, .type = EventType::kStep});
  std::string order;
  for (const Placed& each : merged(sources)) order += fmt::format("{}:{} ", each.source, each.event->time);
  EXPECT_EQ(order, "0:10 1:9 0:20 0:15 1:18 0:30 1:29 ");
}

}  // namespace
}  // namespace torpor::console
