// A child process is killed at every call to the file system: before it, after it, and in the middle of every write.
#include <filesystem>

#include <sys/wait.h>
#include <unistd.h>

#include "tests/proof/workloads.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor::proof {
namespace {

using test::Fault;

// What the child said, and whether it was killed.
struct Ending {
  bool killed = false;
  bool failed = false;
  Promise promise;
};

Ending run_killed(const Workload& workload, const Variant& variant, const std::string& directory, Fault fault,
                  uint64_t n) {
  int channel[2];
  EXPECT_EQ(::pipe(channel), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    test::FaultyFileSystem file_system;
    file_system.plan.set(fault, n);
    const World world{file_system, directory, [&](Word word, uint64_t generation) {
                        const char said[2] = {static_cast<char>(word), static_cast<char>(generation)};
                        (void)!::write(channel[1], said, 2);
                      }};
    ::_exit(workload.run(world, variant) ? 0 : 1);
  }
  ::close(channel[1]);
  Ending ending;
  char said[2];
  while (::read(channel[0], said, 2) == 2)
    ending.promise.hear(static_cast<Word>(said[0]), static_cast<uint64_t>(said[1]));
  ::close(channel[0]);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  ending.killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  ending.failed = !ending.killed && !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  return ending;
}

class Crash : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Workloads, Crash, ::testing::Range(0, 9), [](const auto& info) {
  std::string name = workloads()[static_cast<size_t>(info.param)].name;
  std::replace(name.begin(), name.end(), ' ', '_');
  return name;
});

TEST_P(Crash, AcknowledgedIsThereAndPartialIsInvisible) {
  const Workload& workload = workloads()[static_cast<size_t>(GetParam())];
  int points = 0;
  // In memory where there is such a file system: a killed process loses nothing that it wrote, so the disk has no part
  // in this.
  const char* const memory =
      std::filesystem::is_directory("/dev/shm") && ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : nullptr;
  for (const Variant& variant : variants()) {
    const uint64_t calls = [&] {
      const test::TemporaryDirectory temporary(memory);
      test::FaultyFileSystem file_system;
      EXPECT_SUCCEEDS(workload.run({file_system, temporary / "store", [](Word, uint64_t) {}}, variant));
      return file_system.plan.calls.load();
    }();
    for (const Fault fault : {Fault::kKillBefore, Fault::kKillAfter, Fault::kKillTorn}) {
      for (uint64_t n = 1; n <= calls; ++n) {
        const test::TemporaryDirectory temporary(memory);
        const std::string directory = temporary / "store";
        const Ending ending = run_killed(workload, variant, directory, fault, n);
        ASSERT_FALSE(ending.failed) << variant.name << ", call " << n;
        const std::string problem = broken_promise(linux_file_system(), directory, variant, ending.promise);
        ASSERT_EQ(problem, "") << variant.name << ", killed at call " << n << ", mode " << static_cast<int>(fault);
        EXPECT_TRUE(ending.killed || fault == Fault::kKillTorn);  // that happens at writes only
        if (ending.killed) ++points;
      }
    }
  }
  std::printf("proof: %s: killed at %d points, 0 broken promises\n", workload.name, points);
  // So that a test that shrank by itself fails: 15,000 in all.
  constexpr int kLeast[] = {550, 1150, 2700, 2200, 1550, 1300, 1750, 2300, 1400};
  EXPECT_GE(points, kLeast[GetParam()]);
}

}  // namespace
}  // namespace torpor::proof
