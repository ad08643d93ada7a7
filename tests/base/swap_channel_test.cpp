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

class SwapChannelTest : public ::testing::Test {
 protected:
  test::TemporaryDirectory temporary_;
  const std::string path_ = temporary_ / "channel";
  const std::unique_ptr<SwapChannel> out_ = value_of(SwapChannel::create(path_));
  const std::unique_ptr<SwapChannel> in_ = value_of(SwapChannel::open(path_));
};

TEST_F(SwapChannelTest, NoMoreIsTakenThanWasGivenAndLent) {
  ASSERT_SUCCEEDS(out_->supply(3, 100));
  ASSERT_SUCCEEDS(in_->demand(3, 130));
  ASSERT_SUCCEEDS(in_->acquire(3, 30));  // lent
  ASSERT_SUCCEEDS(out_->release(3, 60));
  ASSERT_SUCCEEDS(out_->release(2, 1000));  // of another rank
  ASSERT_SUCCEEDS(in_->acquire(3, 50));
  out_->end();
  EXPECT_FAILS(in_->acquire(3, 11), Code::kResourceExhausted, "11 bytes of device memory are needed, and 10 are free");
  EXPECT_SUCCEEDS(in_->acquire(3, 10));
  EXPECT_EQ(in_->released(3), 60u);
}

TEST_F(SwapChannelTest, WhoTakesWaitsForWhatIsGiven) {
  constexpr uint64_t kPages = 1000;
  std::thread giver([&] {
    for (uint64_t page = 0; page < kPages; ++page) EXPECT_SUCCEEDS(out_->release(0, 2));
    out_->end();
  });
  for (uint64_t page = 0; page < kPages; ++page) EXPECT_SUCCEEDS(in_->acquire(0, 2));
  giver.join();
  EXPECT_TRUE(value_of(in_->wait_for_more(0, 2 * kPages - 1)));
  EXPECT_FALSE(value_of(in_->wait_for_more(0, 2 * kPages)));
}

TEST_F(SwapChannelTest, WhoWaitsIsToldThatTheOtherStopped) {
  std::thread giver([&] { EXPECT_TRUE(out_->stop()); });
  EXPECT_FAILS(in_->acquire(0, 1), Code::kAborted, "other engine");
  giver.join();
  EXPECT_FALSE(in_->stop());
  EXPECT_FAILS(out_->release(0, 1), Code::kAborted, "other engine");
  EXPECT_FAILS(in_->wait_for_more(0, 0), Code::kAborted, "other engine");
}

TEST_F(SwapChannelTest, EachSideWaitsForTheOther) {
  using Stage = SwapChannel::Stage;
  std::unique_ptr<SwapChannel> out = value_of(SwapChannel::open(path_));
  EXPECT_FALSE(in_->has_joined(SwapChannel::Side::kSwapsOut));
  EXPECT_SUCCEEDS(out->join(SwapChannel::Side::kSwapsOut, 2));
  EXPECT_TRUE(in_->has_joined(SwapChannel::Side::kSwapsOut));
  EXPECT_FAILS(out_->join(SwapChannel::Side::kSwapsOut, 2), Code::kFailedPrecondition, "has this side");
  std::thread taker([&] {
    EXPECT_SUCCEEDS(in_->join(SwapChannel::Side::kSwapsIn, 2));
    EXPECT_SUCCEEDS(in_->wait_for(Stage::kReady));
    in_->reach(Stage::kReady);
    EXPECT_SUCCEEDS(in_->wait_for(Stage::kDone));
    EXPECT_SUCCEEDS(in_->commit());
    EXPECT_FALSE(in_->stop());  // too late
    in_->reach(Stage::kDone);
  });
  EXPECT_SUCCEEDS(out->wait_for(Stage::kHere));
  out->reach(Stage::kReady);
  EXPECT_SUCCEEDS(out->wait_for(Stage::kReady));
  EXPECT_FAILS(out->wait_for(Stage::kDone, [] { return Error{.code = Code::kAborted, .what = "enough"}; }),
               Code::kAborted, "enough");
  out->reach(Stage::kDone);
  EXPECT_EQ(out->wait_for_end(), SwapChannel::End::kRuns);
  taker.join();
  EXPECT_TRUE(out->has_joined(SwapChannel::Side::kSwapsIn));
  out.reset();  // its end is none of an engine that was done
  EXPECT_EQ(in_->stopped_by(), std::nullopt);
  EXPECT_FALSE(in_->other_ended());
}

TEST_F(SwapChannelTest, WhoEndsWithoutAWordIsNoticedByWhoWaits) {
  ASSERT_SUCCEEDS(out_->supply(0, 100));
  std::unique_ptr<SwapChannel> out = value_of(SwapChannel::open(path_));
  EXPECT_SUCCEEDS(out->join(SwapChannel::Side::kSwapsOut, 1));
  EXPECT_SUCCEEDS(in_->join(SwapChannel::Side::kSwapsIn, 1));
  const std::unique_ptr<SwapChannel> rank = value_of(SwapChannel::open(path_));
  std::thread ends([&] { out.reset(); });
  EXPECT_FAILS(rank->acquire(0, 1), Code::kAborted, "process of the other engine ended");
  ends.join();
  EXPECT_FAILS(in_->wait_for(SwapChannel::Stage::kReady), Code::kAborted, "process of the other engine ended");
  EXPECT_EQ(in_->stopped_by(), SwapChannel::Side::kSwapsOut);
  EXPECT_TRUE(in_->other_ended());
}

TEST_F(SwapChannelTest, NobodyWaitsForWhoIsNotSentAnyMore) {
  const std::string path = temporary_ / "made by somebody else";
  std::unique_ptr<SwapChannel> maker = value_of(SwapChannel::create(path));
  const std::unique_ptr<SwapChannel> in = value_of(SwapChannel::open(path));
  EXPECT_SUCCEEDS(in->join(SwapChannel::Side::kSwapsIn, 1));
  std::thread ends([&] { maker.reset(); });
  EXPECT_FAILS(in->wait_for(SwapChannel::Stage::kReady), Code::kAborted, "other engine");
  ends.join();
}

// A side that is stopped, or hangs, and its process lives.
TEST_F(SwapChannelTest, WhoGivesNoSignIsGivenUp) {
  using Stage = SwapChannel::Stage;
  using End = SwapChannel::End;
  for (const bool out_hangs : {false, true}) {
    const std::string path = temporary_ / (out_hangs ? "giver hangs" : "taker hangs");
    const std::unique_ptr<SwapChannel> maker = value_of(SwapChannel::create(path, std::chrono::milliseconds{120}));
    const std::unique_ptr<SwapChannel> out = value_of(SwapChannel::open(path));
    const std::unique_ptr<SwapChannel> in = value_of(SwapChannel::open(path));
    EXPECT_SUCCEEDS(out->join(SwapChannel::Side::kSwapsOut, 1));
    EXPECT_SUCCEEDS(in->join(SwapChannel::Side::kSwapsIn, 1));
    if (out_hangs) {
      const std::unique_ptr<SwapChannel> rank = value_of(SwapChannel::open(path));
      EXPECT_FAILS(rank->acquire(0, 1), Code::kTimeout, "no heartbeat of the engine that falls asleep for 0.12 s");
      EXPECT_FAILS(in->wait_for(Stage::kDone), Code::kTimeout, "no heartbeat of the engine that falls asleep");
      EXPECT_EQ(out->stopped_by(), SwapChannel::Side::kSwapsIn);
      EXPECT_FAILS(out->release(0, 1), Code::kAborted, "has given it up: it had no heartbeat of this one for 0.12 s");
    } else {
      EXPECT_FAILS(out->wait_for(Stage::kReady), Code::kTimeout, "no heartbeat of the engine that wakes for 0.12 s");
      EXPECT_EQ(out->stopped_by(), SwapChannel::Side::kSwapsOut);
      EXPECT_EQ(out->wait_for_end(), End::kMayHold);
      EXPECT_FAILS(in->acquire(0, 1), Code::kAborted, "has given it up");
      in->reach(Stage::kFailed);
      EXPECT_EQ(out->wait_for_end(), End::kHasNothing);
    }
  }
}

TEST_F(SwapChannelTest, WhoHasCommittedIsNotGivenUp) {
  using Stage = SwapChannel::Stage;
  using End = SwapChannel::End;
  for (const bool commits : {false, true}) {
    const std::string path = temporary_ / (commits ? "commits" : "is given up");
    const std::unique_ptr<SwapChannel> out = value_of(SwapChannel::create(path, std::chrono::milliseconds{120}));
    const std::unique_ptr<SwapChannel> in = value_of(SwapChannel::open(path));
    EXPECT_SUCCEEDS(out->join(SwapChannel::Side::kSwapsOut, 1));
    EXPECT_SUCCEEDS(in->join(SwapChannel::Side::kSwapsIn, 1));
    EXPECT_FAILS(in->commit(), Code::kAborted, "other engine");  // too early
    out->reach(Stage::kDone);
    if (commits) {
      EXPECT_SUCCEEDS(in->commit());
      EXPECT_EQ(out->wait_for_end(), End::kMayRun);
      EXPECT_EQ(out->stopped_by(), std::nullopt);
    } else {
      EXPECT_EQ(out->wait_for_end(), End::kMayHold);
      EXPECT_FAILS(in->commit(), Code::kAborted, "has given it up");
      EXPECT_EQ(out->stopped_by(), SwapChannel::Side::kSwapsOut);
    }
    in->reach(Stage::kLost);
    EXPECT_EQ(out->stopped_by(), commits ? SwapChannel::Side::kSwapsIn : SwapChannel::Side::kSwapsOut);
    EXPECT_EQ(out->wait_for_end(), End::kMayHold);
  }
}

// Every sign begins the time anew, whoever gives it: a rank, too.
TEST_F(SwapChannelTest, WhoIsSlowButGivesSignsIsWaitedFor) {
  const std::string path = temporary_ / "slow";
  const std::unique_ptr<SwapChannel> out = value_of(SwapChannel::create(path, std::chrono::milliseconds{1500}));
  const std::unique_ptr<SwapChannel> in = value_of(SwapChannel::open(path));
  EXPECT_SUCCEEDS(out->join(SwapChannel::Side::kSwapsOut, 1));
  EXPECT_SUCCEEDS(in->join(SwapChannel::Side::kSwapsIn, 1));
  std::thread taker([&] {
    const std::unique_ptr<SwapChannel> rank = value_of(SwapChannel::open(path));
    for (int page = 0; page < 6; ++page) {
      std::this_thread::sleep_for(std::chrono::milliseconds{300});
      EXPECT_SUCCEEDS(rank->acquire(0, 1));
    }
    in->reach(SwapChannel::Stage::kReady);
  });
  EXPECT_SUCCEEDS(out->release(0, 6));
  EXPECT_SUCCEEDS(out->wait_for(SwapChannel::Stage::kReady));
  taker.join();
}

TEST_F(SwapChannelTest, TimeForWhichAProcessIsStoppedItselfDoesNotCount) {
  const std::string path = temporary_ / "stopped";
  const std::unique_ptr<SwapChannel> maker = value_of(SwapChannel::create(path, std::chrono::milliseconds{300}));
  const std::unique_ptr<SwapChannel> out = value_of(SwapChannel::open(path));
  EXPECT_SUCCEEDS(out->join(SwapChannel::Side::kSwapsOut, 1));
  const pid_t child = ::fork();
  if (child == 0) {
    const std::unique_ptr<SwapChannel> in = value_of(SwapChannel::open(path));
    EXPECT_SUCCEEDS(in->join(SwapChannel::Side::kSwapsIn, 1));
    EXPECT_SUCCEEDS(in->wait_for(SwapChannel::Stage::kReady));
    ::_exit(HasFailure() ? 1 : 0);
  }
  EXPECT_SUCCEEDS(out->wait_for(SwapChannel::Stage::kHere));
  std::this_thread::sleep_for(std::chrono::milliseconds{20});
  EXPECT_EQ(::kill(child, SIGSTOP), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds{600});
  EXPECT_EQ(::kill(child, SIGCONT), 0);
  std::this_thread::sleep_for(std::chrono::milliseconds{70});
  out->reach(SwapChannel::Stage::kReady);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(SwapChannelTest, ASwapThatIsGivenUpAtOnceIsRefused) {
  for (const double seconds : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_FAILS(SwapChannel::create(temporary_ / "no time", SwapChannel::Seconds(seconds)), Code::kInvalidArgument,
                 "given up after");
  }
}

TEST_F(SwapChannelTest, EnginesOfOtherRanksDoNotMeet) {
  const std::unique_ptr<SwapChannel> out = value_of(SwapChannel::open(path_));
  EXPECT_SUCCEEDS(out->join(SwapChannel::Side::kSwapsOut, 1));
  EXPECT_FAILS(in_->join(SwapChannel::Side::kSwapsIn, 2), Code::kFailedPrecondition, "1 and 2 ranks");
}

// The path may come from another process.
TEST_F(SwapChannelTest, WhatOthersCanWriteIsNotOpened) {
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

TEST_F(SwapChannelTest, WhatIsNotSuchAFileAndARankThatIsNotThereAreRefused) {
  EXPECT_FAILS(SwapChannel::open(temporary_ / "nothing"), Code::kNotFound, "nothing");
  EXPECT_FAILS(SwapChannel::create(path_), Code::kIo, path_);  // something is there
  ASSERT_EQ(::truncate(path_.c_str(), 0), 0);
  EXPECT_FAILS(SwapChannel::open(path_), Code::kCorruption, "a swap file");
  EXPECT_FAILS(out_->supply(SwapChannel::kMostRanks, 1), Code::kUnsupported, "64 ranks");
  EXPECT_FAILS(in_->demand(SwapChannel::kMostRanks, 1), Code::kUnsupported, "64 ranks");
}

}  // namespace
}  // namespace torpor
