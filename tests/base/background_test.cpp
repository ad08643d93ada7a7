// SPDX-License-Identifier: Apache-2.0
#include "base/background.h"

#include <atomic>
#include <stdexcept>

#include <gtest/gtest.h>

#include "tests/support/results.h"

namespace torpor {
namespace {

using test::failed_with;

class BackgroundTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(WithAThreadAndWithout, BackgroundTest, ::testing::Bool());

TEST_P(BackgroundTest, SaysOnceHowItsWorkEnded) {
  Background background(GetParam());
  EXPECT_TRUE(background.ended());
  EXPECT_TRUE(background.wait());
  ASSERT_SUCCEEDS(background.begin([]() -> Status { return Error{.code = Code::kIo, .what = "no disk"}; }));
  EXPECT_TRUE(failed_with(background.wait(), Code::kIo, "no disk"));
  EXPECT_TRUE(background.wait());
  ASSERT_SUCCEEDS(background.begin([]() -> Status { throw std::runtime_error("thrown"); }));
  while (!background.ended()) {}
  EXPECT_TRUE(failed_with(background.wait(), Code::kInternal, "thrown"));
}

TEST_P(BackgroundTest, OneAfterTheOtherAndTheLastBeforeItGoes) {
  std::atomic<int> done = 0;
  {
    Background background(GetParam());
    for (int i = 0; i < 3; ++i) {
      ASSERT_SUCCEEDS(background.begin([&done, i]() -> Status {
        EXPECT_EQ(done++, i);
        return ok();
      }));
    }
  }
  EXPECT_EQ(done, 3);
}

TEST(Background, ServesItsOwnerMeanwhile) {
  Background background(true);
  std::atomic<bool> go = false;
  ASSERT_SUCCEEDS(background.begin([&]() -> Status {
    while (!go) {}
    return ok();
  }));
  EXPECT_FALSE(background.ended());
  go = true;
  EXPECT_TRUE(background.wait());
}

}  // namespace
}  // namespace torpor
