// A child process is killed at every call to the file system, before it and after it took effect. Whatever happens: what
// was acknowledged is there and whole, nothing else is half visible, and the next writer works and cleans up.
#include <functional>

#include <sys/wait.h>
#include <unistd.h>

#include "checkpoint/verify.h"
#include "tests/support/faulty_file_system.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"
#include "tests/support/written_checkpoint.h"

namespace torpor {
namespace {

using test::Fault;
using test::value_of;

// Runs in the child; returns how many checkpoints it was promised.
using Workload = std::function<void(test::FaultyFileSystem&, const std::string& directory, const std::function<void(char)>& acknowledge)>;

std::unique_ptr<CheckpointManager> manager(FileSystem& file_system, const std::string& directory, int keep = 2) {
  return value_of(CheckpointManager::open(file_system, directory, {.retention = {.keep = keep}}));
}

void write(test::FaultyFileSystem& file_system, const std::string& directory, const std::function<void(char)>& acknowledge) {
  if (test::write_checkpoint(*manager(file_system, directory))) acknowledge('w');
}

void retire(test::FaultyFileSystem& file_system, const std::string& directory, const std::function<void(char)>& acknowledge) {
  write(file_system, directory, acknowledge);
  if (manager(file_system, directory, 1)->woken_from(2)) acknowledge('r');
}

void abandon(test::FaultyFileSystem& file_system, const std::string& directory, const std::function<void(char)>&) {
  const Result<PendingCheckpoint> pending = manager(file_system, directory)->begin(0);
}

// Kills the workload at call `n`; returns false when it ended before, and what was acknowledged.
bool killed_at(uint64_t n, Fault fault, const Workload& workload, const std::string& directory, std::string& acknowledged) {
  int channel[2];
  EXPECT_EQ(::pipe(channel), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    test::FaultyFileSystem file_system;
    file_system.plan.set(fault, n);
    workload(file_system, directory, [&](char what) { (void)!::write(channel[1], &what, 1); });
    ::_exit(0);
  }
  ::close(channel[1]);
  char byte = 0;
  while (::read(channel[0], &byte, 1) == 1) acknowledged += byte;
  ::close(channel[0]);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE((WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) << status;
  return WIFSIGNALED(status);
}

// Runs the workload with a kill at every call. `before` checkpoints exist beforehand; returns the number of kill points.
int kill_everywhere(const Workload& workload, int before, const std::function<void(const std::vector<CheckpointInfo>&, const std::string&)>& check) {
  int points = 0;
  for (const Fault fault : {Fault::kKillBefore, Fault::kKillAfter}) {
    for (uint64_t n = 1; n < 500; ++n) {
      SCOPED_TRACE(testing::Message() << "call " << n << (fault == Fault::kKillBefore ? " before" : " after"));
      const test::TemporaryDirectory temporary;
      for (int i = 0; i < before; ++i) (void)value_of(test::write_checkpoint(*manager(linux_file_system(), temporary.path())));
      std::string acknowledged;
      const bool killed = killed_at(n, fault, workload, temporary.path(), acknowledged);
      const auto found = value_of(manager(linux_file_system(), temporary.path())->list());
      for (const CheckpointInfo& info : found) {
        EXPECT_TRUE(info.readable);
        EXPECT_TRUE(value_of(verify(value_of(open_checkpoint(linux_file_system(), info.path)))).problems.empty());
      }
      check(found, acknowledged);
      EXPECT_SUCCEEDS(test::write_checkpoint(*manager(linux_file_system(), temporary.path())));
      for (const auto& entry : boost::filesystem::directory_iterator(temporary.path())) {
        const std::string name = entry.path().filename().string();
        EXPECT_TRUE(name == "LOCK" || name.starts_with("g-")) << name << " is left over";
      }
      if (!killed) break;
      ++points;
    }
  }
  return points;
}

TEST(CheckpointCrash, TheFirstCheckpointIsWholeOrInvisible) {
  const int points = kill_everywhere(write, 0, [](const auto& found, const std::string& acknowledged) {
    EXPECT_GE(found.size(), acknowledged.size());
  });
  EXPECT_GT(points, 40);
}

TEST(CheckpointCrash, ASecondCheckpointNeverHarmsTheFirst) {
  const int points = kill_everywhere(write, 1, [](const auto& found, const std::string& acknowledged) {
    ASSERT_GE(found.size(), acknowledged.empty() ? 1u : 2u);
    EXPECT_EQ(found[0].manifest.generation, 1u);
  });
  EXPECT_GT(points, 40);
}

TEST(CheckpointCrash, RetiringAnOldOneNeverTakesTheNewest) {
  const int points = kill_everywhere(retire, 1, [](const auto& found, const std::string& acknowledged) {
    ASSERT_FALSE(found.empty());
    if (acknowledged.find('w') != std::string::npos) {
      EXPECT_EQ(found.back().manifest.generation, 2u);
    }
    if (acknowledged.find('r') != std::string::npos) {
      EXPECT_EQ(found.size(), 1u);
    }
  });
  EXPECT_GT(points, 50);
}

TEST(CheckpointCrash, AnAbandonedOneLeavesTheOldAlone) {
  kill_everywhere(abandon, 2, [](const auto& found, const std::string&) { EXPECT_EQ(found.size(), 2u); });
}

}  // namespace
}  // namespace torpor
