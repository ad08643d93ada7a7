// SPDX-License-Identifier: Apache-2.0
#include "base/swap_channel.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>

#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor {
namespace {

using test::value_of;

class RoomFileTest : public ::testing::Test {
 protected:
  test::TemporaryDirectory temporary_;
  const std::string path_ = temporary_ / "room";
  const std::unique_ptr<SwapChannel> gives_ = value_of(SwapChannel::create(path_));
  const std::unique_ptr<SwapChannel> takes_ = value_of(SwapChannel::open(path_));
};

TEST_F(RoomFileTest, NoMoreIsTakenThanWasGivenAndLent) {
  ASSERT_SUCCEEDS(gives_->promise(3, 100));
  ASSERT_SUCCEEDS(takes_->need(3, 130));
  ASSERT_SUCCEEDS(takes_->take(3, 30));  // lent
  ASSERT_SUCCEEDS(gives_->give(3, 60));
  ASSERT_SUCCEEDS(gives_->give(2, 1000));  // of another rank
  ASSERT_SUCCEEDS(takes_->take(3, 50));
  gives_->end();
  EXPECT_FAILS(takes_->take(3, 11), Code::kResourceExhausted, "11 bytes of device memory are needed, and 10 are free");
  EXPECT_SUCCEEDS(takes_->take(3, 10));
  EXPECT_EQ(takes_->given(3), 60u);
}

TEST_F(RoomFileTest, WhoTakesWaitsForWhatIsGiven) {
  constexpr uint64_t kPages = 1000;
  std::thread giver([&] {
    for (uint64_t page = 0; page < kPages; ++page) EXPECT_SUCCEEDS(gives_->give(0, 2));
    gives_->end();
  });
  for (uint64_t page = 0; page < kPages; ++page) EXPECT_SUCCEEDS(takes_->take(0, 2));
  giver.join();
  EXPECT_TRUE(value_of(takes_->wait_for_more(0, 2 * kPages - 1)));
  EXPECT_FALSE(value_of(takes_->wait_for_more(0, 2 * kPages)));
}

TEST_F(RoomFileTest, WhoWaitsIsToldThatTheOtherStopped) {
  std::thread giver([&] { EXPECT_TRUE(gives_->stop()); });
  EXPECT_FAILS(takes_->take(0, 1), Code::kAborted, "other engine");
  giver.join();
  EXPECT_FALSE(takes_->stop());
  EXPECT_FAILS(gives_->give(0, 1), Code::kAborted, "other engine");
  EXPECT_FAILS(takes_->wait_for_more(0, 0), Code::kAborted, "other engine");
}

TEST_F(RoomFileTest, EachSideWaitsForTheOther) {
  using Stage = SwapChannel::Stage;
  std::unique_ptr<SwapChannel> gives = value_of(SwapChannel::open(path_));
  EXPECT_FALSE(takes_->has_come(SwapChannel::Side::kGives));
  EXPECT_SUCCEEDS(gives->join(SwapChannel::Side::kGives, 2));
  EXPECT_TRUE(takes_->has_come(SwapChannel::Side::kGives));
  EXPECT_FAILS(gives_->join(SwapChannel::Side::kGives, 2), Code::kFailedPrecondition, "has this side");
  std::thread taker([&] {
    EXPECT_SUCCEEDS(takes_->join(SwapChannel::Side::kTakes, 2));
    EXPECT_SUCCEEDS(takes_->wait_for(Stage::kReady));
    takes_->say(Stage::kReady);
    EXPECT_SUCCEEDS(takes_->wait_for(Stage::kDone));
    EXPECT_SUCCEEDS(takes_->commit());
    EXPECT_FALSE(takes_->stop());  // too late
    takes_->say(Stage::kDone);
  });
  EXPECT_SUCCEEDS(gives->wait_for(Stage::kHere));
  gives->say(Stage::kReady);
  EXPECT_SUCCEEDS(gives->wait_for(Stage::kReady));
  EXPECT_FAILS(gives->wait_for(Stage::kDone, [] { return Error{.code = Code::kAborted, .what = "enough"}; }),
               Code::kAborted, "enough");
  gives->say(Stage::kDone);
  EXPECT_EQ(gives->wait_for_end(), SwapChannel::End::kRuns);
  taker.join();
  EXPECT_TRUE(gives->has_come(SwapChannel::Side::kTakes));
  gives.reset();  // its end is none of an engine that was done
  EXPECT_EQ(takes_->stopped_by(), std::nullopt);
  EXPECT_FALSE(takes_->other_ended());
}

TEST_F(RoomFileTest, WhoEndsWithoutAWordIsNoticedByWhoWaits) {
  ASSERT_SUCCEEDS(gives_->promise(0, 100));
  std::unique_ptr<SwapChannel> gives = value_of(SwapChannel::open(path_));
  EXPECT_SUCCEEDS(gives->join(SwapChannel::Side::kGives, 1));
  EXPECT_SUCCEEDS(takes_->join(SwapChannel::Side::kTakes, 1));
  const std::unique_ptr<SwapChannel> rank = value_of(SwapChannel::open(path_));
  std::thread ends([&] { gives.reset(); });
  EXPECT_FAILS(rank->take(0, 1), Code::kAborted, "process of the other engine ended");
  ends.join();
  EXPECT_FAILS(takes_->wait_for(SwapChannel::Stage::kReady), Code::kAborted, "process of the other engine ended");
  EXPECT_EQ(takes_->stopped_by(), SwapChannel::Side::kGives);
  EXPECT_TRUE(takes_->other_ended());
}

TEST_F(RoomFileTest, NobodyWaitsForWhoIsNotSentAnyMore) {
  const std::string path = temporary_ / "made by somebody else";
  std::unique_ptr<SwapChannel> maker = value_of(SwapChannel::create(path));
  const std::unique_ptr<SwapChannel> takes = value_of(SwapChannel::open(path));
  EXPECT_SUCCEEDS(takes->join(SwapChannel::Side::kTakes, 1));
  std::thread ends([&] { maker.reset(); });
  EXPECT_FAILS(takes->wait_for(SwapChannel::Stage::kReady), Code::kAborted, "other engine");
  ends.join();
}

// A side that is stopped, or hangs, and its process lives.
TEST_F(RoomFileTest, WhoGivesNoSignIsGivenUp) {
  using Stage = SwapChannel::Stage;
  using End = SwapChannel::End;
  for (const bool gives_hangs : {false, true}) {
    const std::string path = temporary_ / (gives_hangs ? "giver hangs" : "taker hangs");
    const std::unique_ptr<SwapChannel> maker = value_of(SwapChannel::create(path, std::chrono::milliseconds{120}));
    const std::unique_ptr<SwapChannel> gives = value_of(SwapChannel::open(path));
    const std::unique_ptr<SwapChannel> takes = value_of(SwapChannel::open(path));
    EXPECT_SUCCEEDS(gives->join(SwapChannel::Side::kGives, 1));
    EXPECT_SUCCEEDS(takes->join(SwapChannel::Side::kTakes, 1));
    if (gives_hangs) {
      const std::unique_ptr<SwapChannel> rank = value_of(SwapChannel::open(path));
      EXPECT_FAILS(rank->take(0, 1), Code::kTimeout, "no sign of the engine that goes for 0.12 s");
      EXPECT_FAILS(takes->wait_for(Stage::kDone), Code::kTimeout, "no sign of the engine that goes");
      EXPECT_EQ(gives->stopped_by(), SwapChannel::Side::kTakes);
      EXPECT_FAILS(gives->give(0, 1), Code::kAborted, "has given it up: it had no sign of this one for 0.12 s");
    } else {
      EXPECT_FAILS(gives->wait_for(Stage::kReady), Code::kTimeout, "no sign of the engine that is to come for 0.12 s");
      EXPECT_EQ(gives->stopped_by(), SwapChannel::Side::kGives);
      EXPECT_EQ(gives->wait_for_end(), End::kMayHold);
      EXPECT_FAILS(takes->take(0, 1), Code::kAborted, "has given it up");
      takes->say(Stage::kFailed);
      EXPECT_EQ(gives->wait_for_end(), End::kHasNothing);
    }
  }
}

TEST_F(RoomFileTest, WhoHasCommittedIsNotGivenUp) {
  using Stage = SwapChannel::Stage;
  using End = SwapChannel::End;
  for (const bool commits : {false, true}) {
    const std::string path = temporary_ / (commits ? "commits" : "is given up");
    const std::unique_ptr<SwapChannel> gives = value_of(SwapChannel::create(path, std::chrono::milliseconds{120}));
    const std::unique_ptr<SwapChannel> takes = value_of(SwapChannel::open(path));
    EXPECT_SUCCEEDS(gives->join(SwapChannel::Side::kGives, 1));
    EXPECT_SUCCEEDS(takes->join(SwapChannel::Side::kTakes, 1));
    EXPECT_FAILS(takes->commit(), Code::kAborted, "other engine");  // too early
    gives->say(Stage::kDone);
    if (commits) {
      EXPECT_SUCCEEDS(takes->commit());
      EXPECT_EQ(gives->wait_for_end(), End::kMayRun);
      EXPECT_EQ(gives->stopped_by(), std::nullopt);
    } else {
      EXPECT_EQ(gives->wait_for_end(), End::kMayHold);
      EXPECT_FAILS(takes->commit(), Code::kAborted, "has given it up");
      EXPECT_EQ(gives->stopped_by(), SwapChannel::Side::kGives);
    }
    takes->say(Stage::kLost);
    EXPECT_EQ(gives->stopped_by(), commits ? SwapChannel::Side::kTakes : SwapChannel::Side::kGives);
    EXPECT_EQ(gives->wait_for_end(), End::kMayHold);
  }
}

// Every sign begins the time anew, whoever gives it: a rank, too.
TEST_F(RoomFileTest, WhoIsSlowButGivesSignsIsWaitedFor) {
  const std::string path = temporary_ / "slow";
  const std::unique_ptr<SwapChannel> gives = value_of(SwapChannel::create(path, std::chrono::milliseconds{400}));
  const std::unique_ptr<SwapChannel> takes = value_of(SwapChannel::open(path));
  EXPECT_SUCCEEDS(gives->join(SwapChannel::Side::kGives, 1));
  EXPECT_SUCCEEDS(takes->join(SwapChannel::Side::kTakes, 1));
  std::thread taker([&] {
    const std::unique_ptr<SwapChannel> rank = value_of(SwapChannel::open(path));
    for (int page = 0; page < 6; ++page) {
      std::this_thread::sleep_for(std::chrono::milliseconds{100});
      EXPECT_SUCCEEDS(rank->take(0, 1));
    }
    takes->say(SwapChannel::Stage::kReady);
  });
  EXPECT_SUCCEEDS(gives->give(0, 6));
  EXPECT_SUCCEEDS(gives->wait_for(SwapChannel::Stage::kReady));
  taker.join();
}

TEST_F(RoomFileTest, TimeForWhichAProcessIsStoppedItselfDoesNotCount) {
  const std::string path = temporary_ / "stopped";
  const std::unique_ptr<SwapChannel> maker = value_of(SwapChannel::create(path, std::chrono::milliseconds{300}));
  const std::unique_ptr<SwapChannel> gives = value_of(SwapChannel::open(path));
  EXPECT_SUCCEEDS(gives->join(SwapChannel::Side::kGives, 1));
  const pid_t child = ::fork();
  if (child == 0) {
    const std::unique_ptr<SwapChannel> takes = value_of(SwapChannel::open(path));
    EXPECT_SUCCEEDS(takes->join(SwapChannel::Side::kTakes, 1));
    EXPECT_SUCCEEDS(takes->wait_for(SwapChannel::Stage::kReady));
    ::_exit(HasFailure() ? 1 : 0);
  }
  EXPECT_SUCCEEDS(gives->wait_for(SwapChannel::Stage::kHere));
  std::this_thread::sleep_for(std::chrono::milliseconds{20});
  EXPECT_EQ(::kill(child, SIGSTOP), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds{600});
  EXPECT_EQ(::kill(child, SIGCONT), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds{70});
  gives->say(SwapChannel::Stage::kReady);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(RoomFileTest, ASwapThatIsGivenUpAtOnceIsRefused) {
  for (const double seconds : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_FAILS(SwapChannel::create(temporary_ / "no time", SwapChannel::Seconds(seconds)), Code::kInvalidArgument,
                 "given up after");
  }
}

TEST_F(RoomFileTest, EnginesOfOtherRanksDoNotMeet) {
  const std::unique_ptr<SwapChannel> gives = value_of(SwapChannel::open(path_));
  EXPECT_SUCCEEDS(gives->join(SwapChannel::Side::kGives, 1));
  EXPECT_FAILS(takes_->join(SwapChannel::Side::kTakes, 2), Code::kFailedPrecondition, "1 and 2 ranks");
}

// The path may come from another process.
TEST_F(RoomFileTest, WhatOthersCanWriteIsNotOpened) {
  ASSERT_EQ(::chmod(path_.c_str(), 0620), 0);
  EXPECT_FAILS(SwapChannel::open(path_), Code::kFailedPrecondition, "not a file of this user alone");
  ASSERT_EQ(::chmod(path_.c_str(), 0600), 0);
  ASSERT_EQ(::symlink(path_.c_str(), (temporary_ / "link").c_str()), 0);
  EXPECT_FAILS(SwapChannel::open(temporary_ / "link"), Code::kIo, "link");
  ASSERT_EQ(::mkfifo((temporary_ / "pipe").c_str(), 0600), 0);
  EXPECT_FAILS(SwapChannel::open(temporary_ / "pipe"), Code::kFailedPrecondition, "not a file of this user alone");
  for (const mode_t mode : {0720, 0702, 01777}) {
    ASSERT_EQ(::chmod(temporary_.path().c_str(), mode), 0);
    EXPECT_FAILS(SwapChannel::open(path_), Code::kFailedPrecondition, "not a directory of this user alone");
    EXPECT_FAILS(SwapChannel::create(temporary_ / "new"), Code::kFailedPrecondition, "directory");
    EXPECT_NE(::access((temporary_ / "new").c_str(), F_OK), 0);
  }
  ASSERT_EQ(::chmod(temporary_.path().c_str(), 0700), 0);
  for (const char* path : {"", "room", "./room", "/", "/tmp/"})
    EXPECT_FAILS(SwapChannel::open(path), Code::kInvalidArgument, "absolute path");
  EXPECT_SUCCEEDS(SwapChannel::open(path_));
}

TEST_F(RoomFileTest, WhatIsNotSuchAFileAndARankThatIsNotThereAreRefused) {
  EXPECT_FAILS(SwapChannel::open(temporary_ / "nothing"), Code::kNotFound, "nothing");
  EXPECT_FAILS(SwapChannel::create(path_), Code::kIo, path_);  // something is there
  ASSERT_EQ(::truncate(path_.c_str(), 0), 0);
  EXPECT_FAILS(SwapChannel::open(path_), Code::kCorruption, "a file of room");
  EXPECT_FAILS(gives_->promise(SwapChannel::kMostRanks, 1), Code::kUnsupported, "64 ranks");
  EXPECT_FAILS(takes_->need(SwapChannel::kMostRanks, 1), Code::kUnsupported, "64 ranks");
}

}  // namespace
}  // namespace torpor
