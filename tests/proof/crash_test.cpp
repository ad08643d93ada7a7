// SPDX-License-Identifier: Apache-2.0
// A child process is killed at every call to the file system: before it, after it, and in the middle of every write.
// (Outside of a long run at every second call, of each kind at others.)

#include "tests/proof/killed_child.h"
#include "tests/proof/workloads.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/long_run.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor::proof {
namespace {

using test::Fault;

class Crash : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Workloads, Crash, ::testing::Range(0, 10), [](const auto& info) {
  std::string name = workloads()[static_cast<size_t>(info.param)].name;
  std::replace(name.begin(), name.end(), ' ', '_');
  return name;
});

TEST_P(Crash, AcknowledgedIsThereAndPartialIsInvisible) {
  const Workload& workload = workloads()[static_cast<size_t>(GetParam())];
  const uint64_t stride = test::long_run() ? 1 : 2;
  uint64_t begin = 0;
  int points = 0;
  // In memory where there is such a file system: a killed process loses nothing that it wrote, so the disk has no part
  // in this.
  const char* const memory = test::in_memory();
  for (const Variant& variant : variants()) {
    test::FaultyFileSystem whole;
    std::set<uint64_t> writes;
    whole.plan.writes = &writes;
    {
      const test::TemporaryDirectory temporary(memory);
      EXPECT_SUCCEEDS(workload.run({whole, temporary / "store", [](Word, uint64_t) {}}, variant));
    }
    for (const Fault fault : {Fault::kKillBefore, Fault::kKillAfter, Fault::kKillTorn}) {
      for (uint64_t n = 1 + begin++ % stride; n <= whole.plan.calls; n += stride) {
        if (fault == Fault::kKillTorn && !writes.contains(n)) continue;
        const test::TemporaryDirectory temporary(memory);
        const std::string directory = temporary / "store";
        Promise promise;
        const Ending ending = run_killed(
            fault, n,
            [&](FileSystem& file_system, const Say& say) {
              return workload.run({file_system, directory,
                                   [&](Word word, uint64_t generation) {
                                     say(static_cast<char>(word), static_cast<char>(generation));
                                   }},
                                  variant);
            },
            [&](char word, char generation) {
              promise.hear(static_cast<Word>(word), static_cast<uint64_t>(generation));
            });
        ASSERT_FALSE(ending.failed) << variant.name << ", call " << n;
        test::FaultyFileSystem plain;  // without a queue to the kernel for each of many small files
        const std::string problem = broken_promise(plain, directory, variant, promise);
        ASSERT_EQ(problem, "") << variant.name << ", killed at call " << n << ", mode " << static_cast<int>(fault);
        EXPECT_TRUE(ending.killed);
        if (ending.killed) ++points;
      }
    }
  }
  std::printf("proof: %s: killed at %d points, 0 broken promises\n", workload.name, points);
  // So that a test that shrank by itself fails: 16,000 in all.
  constexpr int kLeast[] = {550, 1150, 2700, 2200, 1550, 1300, 1750, 2300, 1400, 1350};
  EXPECT_GE(points, kLeast[GetParam()] / static_cast<int>(stride));
}

}  // namespace
}  // namespace torpor::proof
