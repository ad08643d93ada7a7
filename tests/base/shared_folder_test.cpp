// SPDX-License-Identifier: Apache-2.0
#include "base/shared_folder.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "base/swap_channel.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor {
namespace {

using test::value_of;

class SharedFolderTest : public ::testing::Test {
 protected:
  // One with a file in it, whose process has been killed.
  std::string left() const {
    std::array<int, 2> ends{};
    EXPECT_EQ(::pipe(ends.data()), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      const std::unique_ptr<SharedFolder> folder = value_of(SharedFolder::make(place_));
      std::ofstream(folder->path() + "/progress") << "some";
      (void)!::write(ends[1], folder->path().c_str(), folder->path().size());
      (void)::raise(SIGKILL);
    }
    (void)::close(ends[1]);
    std::string path(4096, '\0');
    path.resize(static_cast<size_t>(::read(ends[0], path.data(), path.size())));
    (void)::close(ends[0]);
    EXPECT_EQ(::waitpid(child, nullptr, 0), child);
    return path;
  }
  size_t count() const {
    const std::filesystem::directory_iterator all(place_);
    return static_cast<size_t>(std::distance(begin(all), end(all)));
  }
  test::TemporaryDirectory temporary_;
  const std::string place_ = temporary_.path();
};

TEST_F(SharedFolderTest, ItGoesWithAllThatIsInIt) {
  const std::unique_ptr<SharedFolder> other = value_of(SharedFolder::make(place_));
  std::string path;
  {
    const std::unique_ptr<SharedFolder> folder = value_of(SharedFolder::make(place_));
    path = folder->path();
    const std::unique_ptr<SwapChannel> room = value_of(SwapChannel::create(path + "/room"));
    std::ofstream(path + "/progress") << "some";
    SharedFolder::remove_left(place_);
    EXPECT_EQ(::access((path + "/room").c_str(), F_OK), 0) << "its process lives";
  }
  EXPECT_NE(::access(path.c_str(), F_OK), 0);
  EXPECT_EQ(::access(other->path().c_str(), F_OK), 0);
}

TEST_F(SharedFolderTest, WhatAKilledOneLeftGoesWithTheNext) {
  const std::string path = left();
  ASSERT_EQ(::access((path + "/progress").c_str(), F_OK), 0);
  const std::unique_ptr<SharedFolder> folder = value_of(SharedFolder::make(place_));
  EXPECT_NE(::access(path.c_str(), F_OK), 0);
  EXPECT_EQ(count(), 1u);
}

// The process that made the folder has ended; the engines have not.
TEST_F(SharedFolderTest, WhatAnEngineStillUsesStays) {
  const std::string path = left();
  const std::string room = path + "/room";
  (void)value_of(SwapChannel::create(room));
  std::unique_ptr<SwapChannel> engine = value_of(SwapChannel::open(room));
  EXPECT_SUCCEEDS(engine->join(SwapChannel::Side::kSwapsIn, 1));
  SharedFolder::remove_left(place_);
  EXPECT_EQ(::access(room.c_str(), F_OK), 0);
  engine.reset();
  SharedFolder::remove_left(place_);
  EXPECT_EQ(count(), 0u);
}

TEST_F(SharedFolderTest, WhatIsNotItsOwnStays) {
  const std::string others = place_ + "/torpor-shared-others";
  ASSERT_EQ(::mkdir(others.c_str(), 0700), 0);
  ASSERT_EQ(::chmod(others.c_str(), 0770), 0);
  ASSERT_EQ(::mkdir((place_ + "/torpor-1000").c_str(), 0700), 0);
  ASSERT_EQ(::mkdir((temporary_ / "torpor-shared-deep").c_str(), 0700), 0);
  ASSERT_EQ(::mkdir((temporary_ / "torpor-shared-deep/er").c_str(), 0700), 0);
  ASSERT_EQ(::symlink("/", (place_ + "/torpor-shared-link").c_str()), 0);
  SharedFolder::remove_left(place_);
  SharedFolder::remove_left(place_ + "/none");
  EXPECT_EQ(count(), 4u);
  EXPECT_FAILS(SharedFolder::make(place_ + "/none"), Code::kNotFound, "none");
}

}  // namespace
}  // namespace torpor
