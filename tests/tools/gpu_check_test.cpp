// SPDX-License-Identifier: Apache-2.0
#include "tools/gpu_check/gpu_check.h"

#include "base/units.h"
#include "tests/support/fake_cuda_driver.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

// On a fake GPU, whose speed means nothing: every check runs to its end and passes, and the driver is not misused.
TEST(GpuCheck, EveryCheckRunsOnTheFakeDriverAndEachRowIsToldAtOnce) {
  test::FakeCuda fake({.memory_bytes = 2 * kGiB, .granularity_bytes = 2 * kMiB});
  std::vector<nlohmann::ordered_json> rows;
  const auto report =
      gpu_check::run(fake.driver(), {}, {.bytes = 70 * kMiB, .cycle_bytes = 128 * kMiB, .cycles = 3, .rounds = 1},
                     [&](const nlohmann::ordered_json& row) { rows.push_back(row); });
  EXPECT_EQ(report["gpu"], "Fake GPU");
  EXPECT_TRUE(report["passed"].get<bool>()) << report.dump(2);
  ASSERT_EQ(report["checks"].size(), 14u);
  ASSERT_EQ(rows.size(), 15u);
  EXPECT_EQ(rows[0]["gpu"], "Fake GPU");
  for (size_t i = 0; i < 14; ++i) EXPECT_EQ(rows[i + 1], report["checks"][i]);
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
    EXPECT_EQ(row["verdict"], too_large ? "failed" : without_kernel ? "not here" : "passed") << row.dump();
    EXPECT_EQ(row.contains("error"), too_large) << row.dump();
  }
  EXPECT_EQ(fake.left(), "");
}

TEST(GpuCheck, WhenTheTimeIsUsedUpNoCheckBeginsAndNoneCountsAsPassed) {
  test::FakeCuda fake({.memory_bytes = 2 * kGiB, .granularity_bytes = 2 * kMiB});
  const auto report = gpu_check::run(fake.driver(), {}, {.seconds = 0});
  EXPECT_EQ(report["checks"].size(), 14u);
  for (const auto& row : report["checks"]) EXPECT_EQ(row["verdict"], "not here") << row.dump();
}

TEST(GpuCheck, ACheckBeginsNoOtherRoundWhenItsShareIsUsedUp) {
  test::FakeCuda fake({.memory_bytes = 2 * kGiB, .granularity_bytes = 2 * kMiB});
  const auto report = gpu_check::run(
      fake.driver(), {},
      {.bytes = 4 * kMiB, .cycle_bytes = 8 * kMiB, .cycles = 1'000'000, .rounds = 1'000'000, .seconds = 0.5});
  const auto& cycles = report["checks"].back();
  ASSERT_EQ(cycles["check"], "cycles");
  if (cycles["verdict"] != "not here") {
    EXPECT_LT(cycles["cycles"].get<int>(), 1'000'000);
  }
  EXPECT_GE(report["checks"][1]["rounds"].get<int>(), 1);
  EXPECT_LT(report["checks"][1]["rounds"].get<int>(), 1'000'000);
}

}  // namespace
}  // namespace torpor
