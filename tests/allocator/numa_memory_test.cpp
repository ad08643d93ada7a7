// SPDX-License-Identifier: Apache-2.0
// Memory from the NUMA node that a GPU is attached to, where the system refuses to be asked for it.
#include "allocator/numa_memory.h"

#include <algorithm>
#include <cerrno>
#include <thread>

#include "allocator/background_prefault.h"
#include "allocator/cuda/cuda_device.h"
#include "allocator/host_arena.h"
#include "base/mutex.h"
#include "base/units.h"
#include "tests/support/fake_cuda_driver.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::FakeCuda;
using test::value_of;

std::vector<int> own_cores() {
  cpu_set_t set;
  EXPECT_EQ(::sched_getaffinity(0, sizeof set, &set), 0);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

// Refuses to be asked, as mbind does in a container. Writes down which thread touches memory, and where it may run.
class RefusingSystem final : public NumaSystem {
 public:
  struct Touched {
    std::thread::id thread;
    std::vector<int> cores;
    uint64_t bytes = 0;
  };
  explicit RefusingSystem(std::vector<int> cores) : cores_(std::move(cores)) {}
  int prefer(std::byte*, uint64_t, int) override {
    ++asked;
    return EPERM;
  }
  std::vector<int> cores(int node) override { return node == 0 ? cores_ : std::vector<int>(); }
  void touch(std::byte* data, uint64_t size, bool populate) override {
    Touched touched{std::this_thread::get_id(), own_cores(), size};
    NumaSystem::touch(data, size, populate);
    const MutexLock lock(mutex_);
    touched_.push_back(std::move(touched));
  }
  std::vector<Touched> touched() {
    const MutexLock lock(mutex_);
    return touched_;
  }
  int asked = 0;

 private:
  const std::vector<int> cores_;
  Mutex mutex_;
  std::vector<Touched> touched_ TORPOR_GUARDED_BY(mutex_);
};

class NumaMemoryTest : public ::testing::Test {
 protected:
  std::unique_ptr<HostArena> arena(RefusingSystem& system) {
    return value_of(
        HostArena::create({.slab_bytes = 12 * kMiB, .prefault_threads = 2, .pin_for = device_.get(), .numa = &system}));
  }
  FakeCuda fake_{{.host_numa_node = 0}};
  std::unique_ptr<DeviceMemory> device_ = value_of(make_cuda_device(fake_.driver(), {}));
  const std::vector<int> before_ = own_cores();
};

TEST_F(NumaMemoryTest, ThreadsOnTheNodesCoresTouchItFirstAndRunWhereTheyDidAfterwards) {
  if (before_.size() < 2) GTEST_SKIP() << "one core: there is nowhere else to run";
  const std::vector<int> node{before_.back()};
  RefusingSystem system(node);
  const auto made = arena(system);
  const auto first = value_of(made->allocate(12 * kMiB));
  const auto second = value_of(made->allocate(12 * kMiB));
  EXPECT_EQ(system.asked, 1);  // it will not say otherwise
  EXPECT_EQ(made->info().numa_node, 0);
  uint64_t bytes = 0;
  bool other_thread = false;
  for (const RefusingSystem::Touched& each : system.touched()) {
    EXPECT_EQ(each.cores, node);
    bytes += each.bytes;
    other_thread = other_thread || each.thread != std::this_thread::get_id();
  }
  EXPECT_EQ(bytes, made->info().held_bytes);
  EXPECT_TRUE(other_thread);
  EXPECT_EQ(own_cores(), before_);
}

TEST_F(NumaMemoryTest, SoDoesTheThreadThatGivesWayToAllOthers) {
  if (before_.size() < 2) GTEST_SKIP() << "one core: there is nowhere else to run";
  const std::vector<int> node{before_.front()};
  RefusingSystem system(node);
  const auto made = arena(system);
  BackgroundPrefault quiet(*made, [] { return kGiB; });
  quiet.want(8 * kMiB);
  quiet.wait();
  uint64_t bytes = 0;
  for (const RefusingSystem::Touched& each : system.touched()) {
    EXPECT_EQ(each.cores, node);
    EXPECT_NE(each.thread, std::this_thread::get_id());
    bytes += each.bytes;
  }
  EXPECT_EQ(bytes, 8 * kMiB);
}

TEST_F(NumaMemoryTest, CoresThatTheProcessMayNotUseAreLeftOutAndMemoryComesAllTheSame) {
  for (const std::vector<int>& cores : {std::vector<int>{CPU_SETSIZE - 1}, std::vector<int>{}}) {
    RefusingSystem system(cores);
    const auto made = arena(system);
    EXPECT_FALSE(value_of(made->allocate(4 * kMiB)).empty());
    ASSERT_FALSE(system.touched().empty());
    for (const RefusingSystem::Touched& each : system.touched()) EXPECT_EQ(each.cores, before_);
    EXPECT_EQ(made->info().numa_node, std::nullopt);
  }
}

TEST_F(NumaMemoryTest, AThreadThatIsMovedRunsWhereItDidAfterwards) {
  for (const int core : before_) {
    const OnCores here(std::vector{core, CPU_SETSIZE + 5});
    EXPECT_EQ(own_cores(), std::vector{core});
  }
  EXPECT_EQ(own_cores(), before_);
}

TEST(NumaCores, AreReadAsLinuxWritesThem) {
  EXPECT_EQ(parse_cores("0-3,8,10-11"), (std::vector{0, 1, 2, 3, 8, 10, 11}));
  EXPECT_EQ(parse_cores("5"), std::vector{5});
  for (const char* wrong : {"", "1,", "-1", "3-1", "1-", "1 2", "a", "0-99999999"})
    EXPECT_TRUE(parse_cores(wrong).empty()) << wrong;
  EXPECT_TRUE(linux_numa().cores(100'000).empty());
}

TEST(NumaCores, OfAllNodesHaveThoseOfThisProcess) {
  std::vector<int> all;
  for (int node = 0; node < 1024; ++node) {
    const std::vector<int> cores = linux_numa().cores(node);
    all.insert(all.end(), cores.begin(), cores.end());
  }
  if (all.empty()) GTEST_SKIP() << "this kernel knows no NUMA";
  std::sort(all.begin(), all.end());
  const std::vector<int> own = own_cores();
  EXPECT_TRUE(std::includes(all.begin(), all.end(), own.begin(), own.end()));
}

}  // namespace
}  // namespace torpor
