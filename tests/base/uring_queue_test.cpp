// SPDX-License-Identifier: Apache-2.0
#include "base/uring_queue.h"

#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>

#include <gtest/gtest.h>
#include <boost/filesystem.hpp>

namespace torpor {
namespace {

// Return the descriptor of this process's newest io_uring.
int descriptor_of_ring() {
  int found = -1;
  for (const auto& entry : boost::filesystem::directory_iterator("/proc/self/fd")) {
    boost::system::error_code error;
    const std::string target = boost::filesystem::read_symlink(entry.path(), error).string();
    if (target.find("io_uring") != std::string::npos)
      found = std::max(found, std::stoi(entry.path().filename().string()));
  }
  return found;
}

TEST(UringQueue, WithoutARingPlainCallsAreToDoAllThatWasAsked) {
  const std::unique_ptr<UringQueue> queue = UringQueue::create(4);
  if (queue == nullptr) GTEST_SKIP() << "no io_uring here";
  const int ring = descriptor_of_ring();
  ASSERT_GE(ring, 0);
  std::array<std::byte, 16> bytes{};
  std::array<FilePart, 2> parts{FilePart{0, std::span(bytes).first(8), ok()},
                                FilePart{8, std::span(bytes).last(8), ok()}};
  std::array<int32_t, 2> results{};
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  ::close(ring);  // no submission succeeds, and a new ring finds no descriptor
  const rlimit none{.rlim_cur = 0, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  queue->run(0, false, parts, results);
  EXPECT_EQ(results, (std::array<int32_t, 2>{-EAGAIN, -EAGAIN}));
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  results = {};
  queue->run(0, false, parts, results);  // it stays without one
  EXPECT_EQ(results, (std::array<int32_t, 2>{-EAGAIN, -EAGAIN}));
}

}  // namespace
}  // namespace torpor
