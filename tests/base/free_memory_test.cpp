// SPDX-License-Identifier: Apache-2.0
#include "base/free_memory.h"

#include <fstream>

#include <boost/filesystem.hpp>

#include "base/units.h"
#include "tests/support/results.h"
#include "tests/support/temporary_directory.h"

namespace torpor {
namespace {

class FreeMemory : public testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) const {
    const std::string full = root() + path;
    boost::filesystem::create_directories(boost::filesystem::path(full).parent_path());
    std::ofstream(full) << text;
  }
  void machine(uint64_t total, uint64_t available, uint64_t swap = 0) const {
    write("/proc/meminfo", "MemTotal: " + std::to_string(total / kKiB) +
                               " kB\nMemFree: 1 kB\nMemAvailable: " + std::to_string(available / kKiB) +
                               " kB\nSwapFree: " + std::to_string(swap / kKiB) + " kB\n");
  }
  std::string root() const { return temporary_.path(); }

 private:
  const test::TemporaryDirectory temporary_;
};

TEST_F(FreeMemory, OfAMachineHalfIsSpared) {
  machine(8 * kGiB, 6 * kGiB);
  EXPECT_EQ(free_memory(root()), 6 * kGiB);
  EXPECT_EQ(spare_memory(root()), 2 * kGiB);
  machine(8 * kGiB, 3 * kGiB);
  EXPECT_EQ(free_memory(root()), 3 * kGiB);
  EXPECT_EQ(spare_memory(root()), 0u);
}

TEST_F(FreeMemory, OfAGroupAndThoseAboveItTheTightestCounts) {
  machine(64 * kGiB, 60 * kGiB);
  write("/proc/self/cgroup", "1:name=systemd:/\n0::/pod/box\n");
  const std::string pod = "/sys/fs/cgroup/pod";
  write(pod + "/box/memory.max", "max\n");
  write(pod + "/box/memory.high", "max\n");
  write(pod + "/box/memory.current", "1000\n");
  EXPECT_EQ(free_memory(root()), 60 * kGiB);
  // Of what is used three parts are files that the system would drop.
  write(pod + "/memory.max", std::to_string(8 * kGiB));
  write(pod + "/memory.current", std::to_string(5 * kGiB));
  write(pod + "/memory.stat",
        "anon 7\ninactive_file " + std::to_string(kGiB) + "\nactive_file " + std::to_string(2 * kGiB) + "\nfile 99\n");
  EXPECT_EQ(free_memory(root()), 6 * kGiB);
  EXPECT_EQ(spare_memory(root()), 2 * kGiB);
  write(pod + "/box/memory.high", std::to_string(kGiB));
  EXPECT_EQ(free_memory(root()), kGiB - 1000);
  EXPECT_EQ(spare_memory(root()), kGiB / 2 - 1000);
}

TEST_F(FreeMemory, OfAContainerItsOwnRootCountsWhateverItsPathIsCalledOutside) {
  machine(64 * kGiB, 60 * kGiB);
  write("/proc/self/cgroup", "0::/system.slice/docker-5.scope\n");
  write("/sys/fs/cgroup/memory.max", std::to_string(2 * kGiB));
  write("/sys/fs/cgroup/memory.current", std::to_string(kGiB));
  EXPECT_EQ(free_memory(root()), kGiB);
}

TEST_F(FreeMemory, OfTheFirstVersionToo) {
  machine(64 * kGiB, 60 * kGiB);
  write("/proc/self/cgroup", "9:cpu,memory:/a\n4:memoryless:/a\n");
  const std::string group = "/sys/fs/cgroup/memory";
  write(group + "/memory.limit_in_bytes", "9223372036854771712\n");
  write(group + "/memory.usage_in_bytes", "5000\n");
  EXPECT_EQ(free_memory(root()), 60 * kGiB);
  write(group + "/a/memory.limit_in_bytes", std::to_string(4 * kGiB));
  write(group + "/a/memory.usage_in_bytes", std::to_string(3 * kGiB));
  write(group + "/a/memory.stat", "total_inactive_file " + std::to_string(kGiB) + "\n");
  EXPECT_EQ(free_memory(root()), 2 * kGiB);
}

TEST_F(FreeMemory, OfTheKernelOfAGroupTooWhatCanBeDropped) {
  machine(64 * kGiB, 60 * kGiB);
  write("/proc/self/cgroup", "0::/\n");
  write("/sys/fs/cgroup/memory.max", std::to_string(4 * kGiB));
  write("/sys/fs/cgroup/memory.current", std::to_string(3 * kGiB));
  write("/sys/fs/cgroup/memory.stat", "slab_reclaimable " + std::to_string(kGiB) + "\nslab_unreclaimable 5\n");
  EXPECT_EQ(free_memory(root()), 2 * kGiB);
}

TEST_F(FreeMemory, TheSystemEndsNoProcessWhileThereIsSwapSpace) {
  EXPECT_EQ(memory_before_kill(root()), std::nullopt);
  machine(64 * kGiB, 60 * kGiB);
  EXPECT_EQ(memory_before_kill(root()), 60 * kGiB);
  machine(64 * kGiB, 60 * kGiB, 8 * kGiB);
  EXPECT_EQ(memory_before_kill(root()), 68 * kGiB);
  write("/proc/self/cgroup", "0::/box\n");
  const std::string box = "/sys/fs/cgroup/box";
  write(box + "/memory.max", std::to_string(4 * kGiB));
  write(box + "/memory.current", std::to_string(kGiB));
  EXPECT_EQ(memory_before_kill(root()), 11 * kGiB);  // of the machine's
  write(box + "/memory.swap.max", std::to_string(2 * kGiB));
  write(box + "/memory.swap.current", std::to_string(kGiB));
  EXPECT_EQ(memory_before_kill(root()), 4 * kGiB);
  EXPECT_EQ(free_memory(root()), 3 * kGiB);
}

TEST_F(FreeMemory, AGroupOfTheFirstVersionSwapsAsMuchAsItsLimitOfBothLeaves) {
  machine(64 * kGiB, 60 * kGiB, 8 * kGiB);
  write("/proc/self/cgroup", "9:memory:/a\n");
  const std::string group = "/sys/fs/cgroup/memory/a";
  write(group + "/memory.limit_in_bytes", std::to_string(4 * kGiB));
  write(group + "/memory.usage_in_bytes", std::to_string(2 * kGiB));
  write(group + "/memory.stat", "total_inactive_file " + std::to_string(kGiB) + "\n");
  write(group + "/memory.memsw.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(memory_before_kill(root()), 11 * kGiB);
  write(group + "/memory.memsw.limit_in_bytes", std::to_string(6 * kGiB));
  write(group + "/memory.memsw.usage_in_bytes", std::to_string(3 * kGiB));
  EXPECT_EQ(memory_before_kill(root()), 4 * kGiB);
  EXPECT_EQ(free_memory(root()), 3 * kGiB);
  write(group + "/memory.memsw.limit_in_bytes", std::to_string(4 * kGiB));  // of no swap
  EXPECT_EQ(memory_before_kill(root()), 2 * kGiB);
  EXPECT_EQ(free_memory(root()), 2 * kGiB);
}

TEST_F(FreeMemory, AGroupSwapsNoMoreThanThoseAboveItMay) {
  machine(64 * kGiB, 60 * kGiB, 8 * kGiB);
  write("/proc/self/cgroup", "0::/pod/box\n");
  write("/sys/fs/cgroup/pod/box/memory.max", std::to_string(4 * kGiB));
  write("/sys/fs/cgroup/pod/box/memory.current", std::to_string(kGiB));
  write("/sys/fs/cgroup/pod/memory.swap.max", "0\n");
  EXPECT_EQ(memory_before_kill(root()), 3 * kGiB);
}

TEST_F(FreeMemory, OfAMachineThatDoesNotSayWhatIsAvailableNothingIsKnown) {
  write("/proc/meminfo", "MemTotal: 1000 kB\nMemFree: 900 kB\n");
  EXPECT_EQ(memory_before_kill(root()), std::nullopt);
}

TEST_F(FreeMemory, WhereNothingCanBeReadThereIsNone) {
  EXPECT_EQ(free_memory(root()), 0u);
  EXPECT_EQ(spare_memory(root()), 0u);
}

TEST_F(FreeMemory, ThisMachineHasSome) {
  EXPECT_GT(free_memory(), 0u);
  EXPECT_LE(spare_memory(), free_memory() / 2);
}

}  // namespace
}  // namespace torpor
