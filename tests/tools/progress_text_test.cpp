// SPDX-License-Identifier: Apache-2.0
#include "tools/torpor/progress_text.h"

#include <gtest/gtest.h>

namespace torpor::cli {
namespace {

Progress at(double gigabytes, double of, double seconds) {
  return {.phase = "verifying",
          .bytes_done = static_cast<uint64_t>(gigabytes * 1e9),
          .bytes_total = static_cast<uint64_t>(of * 1e9),
          .seconds = seconds};
}

// Columns that a terminal needs for UTF-8: bytes that continue a character need none.
size_t columns_of(const std::string& text) {
  size_t columns = 0;
  for (const char c : text) columns += (static_cast<unsigned char>(c) & 0xc0U) != 0x80U;
  return columns;
}

TEST(ProgressText, HasBarShareBytesRateAndTimeLeft) {
  EXPECT_EQ(progress_text(at(1, 4, 2), 120),
            "verifying  ███████▌░░░░░░░░░░░░░░░░░░░░░░  25 %  1.00 GB of 4.00 GB  500.0 MB/s  6 s left");
  EXPECT_EQ(progress_text(at(0, 4, 0), 72), "verifying  ░░░░░░░░░░░░░░░░   0 %  0.0 kB of 4.00 GB  0.0 kB/s  0 s left");
}

TEST(ProgressText, IsFullOnlyAtTheEnd) {
  EXPECT_NE(progress_text(at(3.9999, 4, 2), 120).find(" 99 %"), std::string::npos);
  const std::string end = progress_text(at(4, 4, 2), 120);
  EXPECT_NE(end.find("100 %"), std::string::npos);
  EXPECT_EQ(end.find("░"), std::string::npos);
  EXPECT_EQ(progress_text(at(5, 4, 2), 120).find("125"), std::string::npos);  // a file that grew meanwhile
}

TEST(ProgressText, NeedsNoMoreColumnsThanThereAre) {
  for (size_t columns = 0; columns <= 130; ++columns) {
    for (const double done : {0.0, 0.4, 2.0, 4.0}) {
      EXPECT_LE(columns_of(progress_text(at(done, 4, 100), columns)), columns);
      EXPECT_LE(columns_of(progress_text(at(done, 0, 100), columns)), columns);
    }
  }
  EXPECT_EQ(progress_text(at(1, 4, 2), 60).find("░"), std::string::npos);  // no room for a bar
}

TEST(ProgressText, SaysLongTimesInMinutesAndHours) {
  EXPECT_NE(progress_text(at(1, 2, 119), 120).find("  119 s left"), std::string::npos);
  EXPECT_NE(progress_text(at(1, 2, 150), 120).find("  2 min 30 s left"), std::string::npos);
  EXPECT_NE(progress_text(at(1, 2, 7500), 120).find("  2 h 5 min left"), std::string::npos);
}

TEST(ProgressText, WithoutATotalItHasBytesAndRate) {
  EXPECT_EQ(progress_text(at(1, 0, 2), 120), "verifying  1.00 GB  500.0 MB/s");
}

}  // namespace
}  // namespace torpor::cli
