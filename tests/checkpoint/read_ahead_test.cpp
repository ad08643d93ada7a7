// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/read_ahead.h"

#include <functional>
#include <map>

#include "base/watched_file_system.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/written_checkpoint.h"

namespace torpor {
namespace {

using test::failed_with;
using test::value_of;

class ReadAheadTest : public ::testing::Test {
 protected:
  ReadAhead ahead(uint64_t budget) { return {*watched_, directory_.path(), nullptr, budget}; }
  std::unique_ptr<CheckpointManager> manager() {
    return value_of(CheckpointManager::open(linux_file_system(), directory_.path(), {.incremental = true}));
  }
  // Reads of files with chunks since the last call.
  int reads() { return std::exchange(reads_, 0); }

  test::TemporaryDirectory directory_;
  int reads_ = 0;
  std::function<void()> on_read_;
  const std::unique_ptr<FileSystem> watched_ =
      make_watched_file_system(linux_file_system(), [this](std::string_view call, const std::string& name) {
        if (call != "pread" || name.find("/chunks-r") == std::string::npos) return ok();
        ++reads_;
        if (on_read_) on_read_();
        return ok();
      });
};

TEST_F(ReadAheadTest, WithoutACheckpointThereIsNothing) {
  EXPECT_TRUE(failed_with(ahead(1 << 20).follow(), Code::kNotFound));
}

TEST_F(ReadAheadTest, EachBlockIsReadOnceAndOfTheNextCheckpointOnlyWhatIsNew) {
  const uint64_t blocks = test::example_checkpoint().state.kv.blocks.size();
  const auto written = manager();
  ReadAhead reader = ahead(1 << 20);
  const std::string first = value_of(test::write_checkpoint(*written));
  ReadAheadReport report = value_of(reader.follow());
  EXPECT_EQ(report.checkpoint, first);
  EXPECT_EQ(report.bytes, blocks * 1000);
  EXPECT_EQ(report.ahead_bytes, report.bytes);
  EXPECT_EQ(report.read_bytes, report.bytes);
  EXPECT_EQ(reads(), static_cast<int>(blocks));
  report = value_of(reader.follow());
  EXPECT_EQ(report.read_bytes, 0U);
  EXPECT_EQ(report.ahead_bytes, report.bytes);
  const auto changed = static_cast<uint64_t>(test::example_checkpoint().state.kv.blocks.front().id);
  const std::string second = value_of(test::write_checkpoint(*written, test::example_checkpoint(), 1, changed));
  EXPECT_NE(second, first);
  report = value_of(reader.follow());
  EXPECT_EQ(report.checkpoint, second);
  EXPECT_EQ(report.bytes, blocks * 1000);
  EXPECT_EQ(report.ahead_bytes, report.bytes);
  EXPECT_EQ(report.read_bytes, 1000U);
  EXPECT_EQ(reads(), 1);
}

TEST_F(ReadAheadTest, WhoStopsItWaitsForOneReadAndNoMore) {
  (void)value_of(test::write_checkpoint(*manager()));
  ReadAhead reader = ahead(1 << 20);
  on_read_ = [&] { reader.stop(); };
  EXPECT_TRUE(failed_with(reader.follow(), Code::kAborted));
  EXPECT_EQ(reads(), 1);
  EXPECT_TRUE(failed_with(reader.follow(), Code::kAborted));
  EXPECT_EQ(reads(), 0);
}

TEST_F(ReadAheadTest, NoMoreThanTheBudgetIsRead) {
  (void)value_of(test::write_checkpoint(*manager()));
  ReadAhead reader = ahead(2500);
  const ReadAheadReport report = value_of(reader.follow());
  EXPECT_EQ(report.ahead_bytes, 2000U);
  EXPECT_EQ(report.read_bytes, 2000U);
  EXPECT_GT(report.bytes, report.ahead_bytes);
}

}  // namespace
}  // namespace torpor
