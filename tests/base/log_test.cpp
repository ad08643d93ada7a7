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

TEST_F(LogTest, ALineIsOneLineWhateverIsInIt) {
  EXPECT_THAT(said([] { log().warn("{} stays", "a\n\x1b[2Jü"); }), HasSubstr("[warning] a\\n\\x1b[2Jü stays\n"));
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

TEST(TextTest, WhatATerminalObeysIsEscaped) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"a\n\tb", "a\\n\\tb"},
      {std::string("\0", 1), "\\x00"},
      {"\x1b[2J\x7f\r", "\\x1b[2J\\x7f\\x0d"},
      {"\u0080\u009b31m\u009f", "\\u0080\\u009b31m\\u009f"},
      {"\u2028\u2029", "\\u2028\\u2029"},
      {"\u061c\u200e\u200f\u202a\u202e\u2066\u2069", "\\u061c\\u200e\\u200f\\u202a\\u202e\\u2066\\u2069"},
      {"\x9b\xff", "\\x9b\\xff"},  // bytes that begin no character
      {"\xc2", "\\xc2"},           // one that has no end
      {"\xe2\x80", "\\xe2\\x80"},
      {"\xc2x", "\\xc2x"},
      {"\xc0\x8a\xe0\x82\x9b", "\\xc0\\x8a\\xe0\\x82\\x9b"},  // longer than it has to be
      {"\xf0\x80\x82\x9b", "\\xf0\\x80\\x82\\x9b"},
      {"\xed\xa0\x80", "\\xed\\xa0\\x80"},           // a surrogate
      {"\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80"},  // above the last character
      {"\xf5\x80\x80\x80", "\\xf5\\x80\\x80\\x80"},
  };
  for (const auto& [text, escaped] : cases) {
    EXPECT_EQ(harmless(text), escaped);
    EXPECT_EQ(harmless(escaped), escaped);
    EXPECT_FALSE(is_harmless(text)) << escaped;
  }
  for (const std::string text :
       {"", "plain ~", "größer €, 中文, \u00a0, \u2027\u202f\u2065\u206a, 🂡, \U0010ffff, \\x1b"}) {
    EXPECT_EQ(harmless(text), text);
    EXPECT_EQ(harmless_json(text), text);
    EXPECT_TRUE(is_harmless(text));
  }
}

TEST(TextTest, ABeginningEndsWithAWholeCharacter) {
  const std::string text = "ü€🂡\xff";  // 2, 3, 4 and 1 bytes
  const std::vector<size_t> lengths = {0, 0, 2, 2, 2, 5, 5, 5, 5, 9, 10, 10};
  for (size_t most = 0; most < lengths.size(); ++most)
    EXPECT_EQ(first_bytes(text, most), text.substr(0, lengths[most]));
}

TEST(TextTest, ColumnsAreThoseOfATerminal) {
  EXPECT_EQ(columns_of(""), 0u);
  EXPECT_EQ(columns_of("größer €"), 8u);
  EXPECT_EQ(columns_of("中文😀"), 6u);
  EXPECT_EQ(columns_of("e\u0301"), 1u);
  EXPECT_EQ(columns_of("\x1b[1;31mbad\x1b[0m"), 3u);
  EXPECT_EQ(padded("中文", 6), "中文  ");
  EXPECT_EQ(padded("\x1b[31mbad\x1b[0m", 4), "\x1b[31mbad\x1b[0m ");
  EXPECT_EQ(padded("中文", 3), "中文");
}

TEST(TextTest, ATerminalIsFilledByColumns) {
  const std::string end = "\x1b[K\n";
  EXPECT_EQ(fitted("größer\n中文 a\nno room\n", 3, 5), "größe" + end + "中文 " + end);
  EXPECT_EQ(fitted("a中\n", 9, 2), "a" + end);  // half a character is none
  EXPECT_EQ(fitted("\x1b[31mbad\x1b[0m\n", 9, 3), "\x1b[31mbad\x1b[0m" + end);
  EXPECT_EQ(fitted("\x1b[31mbad\x1b[0m\n", 9, 2), "\x1b[31mba\x1b[0m" + end);  // the next line has no colour
}

TEST(TextTest, JsonKeepsItsValues) {
  EXPECT_EQ(harmless_json("{\n \"a\": \"\x7f\u009b\u2028\u202eü\"}\n"),
            "{\n \"a\": \"\\u007f\\u009b\\u2028\\u202eü\"}\n");
  EXPECT_EQ(harmless_json("\"\x1b\xff\""), "\"\\u001b\\ufffd\"");
}

}  // namespace
}  // namespace torpor
