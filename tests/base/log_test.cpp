// SPDX-License-Identifier: Apache-2.0
// Log lines, and parts of the sentences in them (base/text.h).
#include "base/log.h"

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include <gmock/gmock.h>

#include "base/text.h"

namespace torpor {
namespace {

using testing::HasSubstr;
using testing::Not;

class LogTest : public testing::Test {
 protected:
  ~LogTest() override { log().set_level(LogLevel::kWarn); }

  // What `write` puts on standard error.
  template <class Write>
  static std::string said(Write&& write) {
    testing::internal::CaptureStderr();
    write();
    return testing::internal::GetCapturedStderr();
  }
};

TEST_F(LogTest, ALineHasItsLevelAndItsArguments) {
  log().set_level(LogLevel::kInfo);
  EXPECT_THAT(said([] { log().info("{} of {}", 1, "two"); }), HasSubstr("[info] 1 of two\n"));
  EXPECT_THAT(said([] { log().warn("{} of {}", 1, "two"); }), HasSubstr("[warning] 1 of two\n"));
  EXPECT_THAT(said([] { log().error("nothing left"); }), HasSubstr("[torpor] [error] nothing left\n"));
  EXPECT_THAT(said([] { log().critical("{}", std::string("{}")); }), HasSubstr("[critical] {}\n"));
}

TEST_F(LogTest, WhatIsBelowTheLevelIsNotWritten) {
  log().set_level(LogLevel::kError);
  EXPECT_EQ(said([] { log().warn("{}", 1); }), "");
  EXPECT_THAT(said([] { log().error("{}", 1); }), HasSubstr("1\n"));
  log().set_level(LogLevel::kOff);
  EXPECT_EQ(said([] { log().critical("{}", 1); }), "");
}

TEST_F(LogTest, ALineThatCannotBeMadeIsWrittenWithoutItsArguments) {
  const std::string line = said([] { log().warn("{:{}} stays", "x", -1); });  // a width that fmt refuses
  EXPECT_THAT(line, HasSubstr("{:{}} stays\n"));
  EXPECT_THAT(line, Not(HasSubstr("x stays")));
}

TEST_F(LogTest, AnErrorInALineIsWrittenWhole) {
  const Error error{.code = Code::kNotFound, .what = "no " + std::string(2000, 'x'), .next_step = "look"};
  EXPECT_THAT(said([&] { log().warn("a: {}", error); }), HasSubstr("[warning] a: " + error.to_string() + "\n"));
  EXPECT_THAT(said([] { log().warn("{}", Error{.code = Code::kIo, .what = "off"}); }), HasSubstr("] io: off\n"));
}

TEST(TextTest, PartsAreJoined) {
  EXPECT_EQ(joined(std::vector<std::string>{"a", "", "c"}, ", "), "a, , c");
  EXPECT_EQ(joined(std::array<std::string_view, 1>{"a"}, ", "), "a");
  EXPECT_EQ(joined(std::vector<std::string>{}, ", "), "");
}

}  // namespace
}  // namespace torpor
