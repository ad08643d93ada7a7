#include "tools/gpu_check/gpu_check.h"

#include "base/units.h"
#include "tests/support/fake_cuda_driver.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

// On a fake GPU, whose speed means nothing: every check runs to its end and passes, and the driver is not misused.
TEST(GpuCheck, EveryCheckRunsOnTheFakeDriver) {
  test::FakeCuda fake({.memory_bytes = 2 * kGiB, .granularity_bytes = 2 * kMiB});
  const auto report =
      gpu_check::run(fake.driver(), {}, {.bytes = 70 * kMiB, .cycle_bytes = 128 * kMiB, .cycles = 3, .rounds = 1});
  EXPECT_EQ(report["gpu"], "Fake GPU");
  EXPECT_TRUE(report["passed"].get<bool>()) << report.dump(2);
  EXPECT_EQ(report["checks"].size(), 14u);
  EXPECT_EQ(fake.left(), "");
}

TEST(GpuCheck, ACheckThatFailsIsARowAndTheOthersRun) {
  test::FakeCuda fake({.memory_bytes = 96 * kMiB, .granularity_bytes = 2 * kMiB});  // the largest blocks do not fit
  const auto report =
      gpu_check::run(fake.driver(), {}, {.bytes = 4 * kMiB, .cycle_bytes = 8 * kMiB, .cycles = 1, .rounds = 1});
  EXPECT_FALSE(report["passed"].get<bool>());
  EXPECT_EQ(report["checks"].size(), 14u);
  for (const auto& row : report["checks"]) {
    const bool without_kernel = row.contains("note");  // nothing to copy with: this build found no nvcc
    const bool too_large =
        !without_kernel && row["check"].get<std::string>().find("of 128 tokens") != std::string::npos;
    EXPECT_EQ(row["passed"].get<bool>(), !too_large) << row.dump();
    EXPECT_EQ(row.contains("error"), too_large) << row.dump();
  }
  EXPECT_EQ(fake.left(), "");
}

}  // namespace
}  // namespace torpor
