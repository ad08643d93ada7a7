// SPDX-License-Identifier: Apache-2.0
// Failures of other systems' sleep and wake that are public, each as a test, on a fake GPU. Where a test lies
// elsewhere:
//   a request that comes in while the engine sleeps (vLLM 15483)            tests/python/test_levels.py
//   a process that is killed after a wake hangs its host (cuda-checkpoint 53)  tests/python/killed_process.py: nothing
//   of the
//                                                                           driver's state is ever restored
//   a restore reports success and its cache is never used (llama.cpp 26676)    tests/python/test_identity.py
#include <cstring>
#include <thread>

#include "allocator/cuda/cuda_device.h"
#include "base/units.h"
#include "engine/rank_memory.h"
#include "engine/tag_sleep.h"
#include "tests/support/fake_cuda_driver.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::FakeCuda;
using test::value_of;
using Lasting = FakeCuda::Lasting;
using Tags = std::vector<std::string>;

constexpr uint64_t kUnit = 64 * kKiB;  // small: what is tried is calls, not bytes
constexpr uint64_t kRegion = 5 * kUnit;

class PublicFailures : public ::testing::Test {
 protected:
  PublicFailures() : fake_({.memory_bytes = 32 * kUnit, .granularity_bytes = kUnit}) {
    memory_ = make();
    for (const char* tag : {"weights", "kv_cache", "runtime"}) {
      addresses_[tag] = value_of(memory_->allocate(tag, "all", kRegion));
      fill(addresses_[tag], tag[0]);
    }
  }
  std::unique_ptr<RankMemory> make() {
    return value_of(RankMemory::create(
        value_of(make_cuda_device(fake_.driver(), {})), linux_file_system(),
        {.arena_slab_bytes = 2 * kMiB, .handle_bytes = 2 * kUnit, .threads = 2, .keep_backup = false}));
  }
  // As an engine's kernel would: on a stream of its own, and without waiting.
  void write_later(DeviceAddress address, char byte) {
    push();
    ASSERT_EQ(fake_.driver().cuMemsetD8Async(address, static_cast<unsigned char>(byte), kRegion, stream_),
              CUDA_SUCCESS);
    pop();
  }
  void fill(DeviceAddress address, char byte) {
    write_later(address, byte);
    push();
    ASSERT_EQ(fake_.driver().cuStreamSynchronize(stream_), CUDA_SUCCESS);
    pop();
  }
  std::string read(DeviceAddress address) {
    std::string bytes(kRegion, '?');
    push();
    EXPECT_EQ(fake_.driver().cuMemcpyDtoHAsync(bytes.data(), address, kRegion, stream_), CUDA_SUCCESS);
    EXPECT_EQ(fake_.driver().cuStreamSynchronize(stream_), CUDA_SUCCESS);
    pop();
    return bytes;
  }
  void push() {
    if (context_ == nullptr) {
      ASSERT_EQ(fake_.driver().cuDevicePrimaryCtxRetain(&context_, 0), CUDA_SUCCESS);
      ASSERT_EQ(fake_.driver().cuCtxPushCurrent(context_), CUDA_SUCCESS);
      ASSERT_EQ(fake_.driver().cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
      return;
    }
    ASSERT_EQ(fake_.driver().cuCtxPushCurrent(context_), CUDA_SUCCESS);
  }
  void pop() {
    CUcontext popped = nullptr;
    ASSERT_EQ(fake_.driver().cuCtxPopCurrent(&popped), CUDA_SUCCESS);
  }
  std::string state(const std::string& tag) { return std::string(name(memory_->states().at(tag))); }
  void expect_content(const Tags& tags) {
    for (const std::string& tag : tags) EXPECT_EQ(read(addresses_[tag]), std::string(kRegion, tag[0])) << tag;
  }
  // Memory of the GPU that somebody else holds.
  CUmemGenericAllocationHandle take(uint64_t bytes) {
    push();
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    CUmemGenericAllocationHandle handle = 0;
    EXPECT_EQ(fake_.driver().cuMemCreate(&handle, bytes, &properties, 0), CUDA_SUCCESS);
    pop();
    return handle;
  }
  void give_back(CUmemGenericAllocationHandle handle) {
    push();
    EXPECT_EQ(fake_.driver().cuMemRelease(handle), CUDA_SUCCESS);
    pop();
  }

  FakeCuda fake_;
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
  std::unique_ptr<RankMemory> memory_;
  std::map<std::string, DeviceAddress> addresses_;
};

// vLLM 28714, 45552: sleep while kernels run; illegal access, and HTTP 200 while the engine dies.
TEST_F(PublicFailures, ASleepWaitsForWhatTheEngineStillRuns) {
  write_later(addresses_["weights"], 'w');
  write_later(addresses_["kv_cache"], 'n');
  ASSERT_SUCCEEDS(TagSleep(*memory_).sleep({}, {"weights", "kv_cache"}));
  ASSERT_SUCCEEDS(TagSleep(*memory_).wake({}));
  EXPECT_EQ(read(addresses_["kv_cache"]), std::string(kRegion, 'n'));  // what the last kernel wrote was saved
}

// vLLM 12981: no memory on wake; the call returned normally, the process crashed later.
TEST_F(PublicFailures, NoMemoryOnWakeIsAnErrorOfThatCall) {
  ASSERT_SUCCEEDS(TagSleep(*memory_).sleep({}, {"weights"}));
  const auto other = take(20 * kUnit);
  EXPECT_FAILS(TagSleep(*memory_).wake({}), Code::kResourceExhausted);
  EXPECT_EQ(state("weights"), "detached");
  EXPECT_NE(value_of(TagSleep(*memory_).plan_wake({})).obstacle, "");  // and could be known before
  give_back(other);
}

// vLLM 34602, SGLang 14092: no memory on wake; what was mapped already leaked, nothing was rolled back.
TEST_F(PublicFailures, NoMemoryOnWakeLeavesNothingMappedAndTheBackupWhole) {
  ASSERT_SUCCEEDS(TagSleep(*memory_).sleep({}, {"weights", "runtime"}));
  const auto other = take(32 * kUnit - 12 * kUnit);  // the first regions fit
  const uint64_t used = fake_.used_bytes();
  const uint64_t created = fake_.counts()["cuMemCreate"];
  EXPECT_FAILS(TagSleep(*memory_).wake({}), Code::kResourceExhausted, "are needed to wake");
  EXPECT_EQ(fake_.counts()["cuMemCreate"], created);  // nothing was tried
  EXPECT_EQ(fake_.used_bytes(), used);
  give_back(other);
  ASSERT_SUCCEEDS(TagSleep(*memory_).wake({}));
  expect_content({"weights", "runtime"});
}

// vLLM 45565: an error that stays in a global blocks the next wake.
TEST_F(PublicFailures, AnErrorIsThatOfItsCallOnly) {
  ASSERT_SUCCEEDS(TagSleep(*memory_).sleep({}, {"weights"}));
  for (uint64_t call = 1;; ++call) {
    fake_.fail(call, CUDA_ERROR_UNKNOWN, Lasting::kOnce);
    const bool woke = TagSleep(*memory_).wake({}).has_value();
    const bool fired = fake_.fired();
    fake_.heal();
    if (!woke) {
      ASSERT_SUCCEEDS(TagSleep(*memory_).wake({}));
    }
    expect_content({"weights"});
    if (!fired) break;
    ASSERT_SUCCEEDS(TagSleep(*memory_).sleep({}, {"weights"}));
  }
}

// vLLM 36651: double release, mapping what is mapped, freeing during sleep; no state of each allocation.
TEST_F(PublicFailures, MemoryFreedWhileItSleepsIsFreedOnce) {
  const DeviceAddress more = value_of(memory_->allocate("weights", "more", kRegion));
  fill(more, 'm');
  ASSERT_SUCCEEDS(TagSleep(*memory_).sleep({}, {"weights", "kv_cache"}));
  EXPECT_FAILS(TagSleep(*memory_).sleep({"weights"}, {}), Code::kFailedPrecondition, "detached");
  for (const char* tag : {"kv_cache", "weights"}) {  // the only region of its tag, and one of two
    ASSERT_SUCCEEDS(memory_->free(addresses_[tag]));
    EXPECT_FAILS(memory_->free(addresses_[tag]), Code::kNotFound);
  }
  ASSERT_SUCCEEDS(TagSleep(*memory_).wake({}));
  EXPECT_FAILS(TagSleep(*memory_).wake({}), Code::kFailedPrecondition);
  EXPECT_EQ(read(more), std::string(kRegion, 'm'));
  EXPECT_EQ(fake_.used_bytes(), 2 * kRegion);
}

// vLLM-omni 4473, vLLM 29341, 16234: a wrong tag or a wake of some, and the output is nonsense.
TEST_F(PublicFailures, AWrongTagTouchesNothingAndSomeTagsWakeAsTheyWere) {
  EXPECT_FAILS(TagSleep(*memory_).sleep({"weights", "wieghts"}, {"weights"}), Code::kNotFound, "wieghts");
  EXPECT_EQ(state("weights"), "attached");
  ASSERT_SUCCEEDS(TagSleep(*memory_).sleep({}, {"weights", "kv_cache", "runtime"}));
  EXPECT_FAILS(TagSleep(*memory_).wake({"kv"}), Code::kNotFound);
  ASSERT_SUCCEEDS(TagSleep(*memory_).wake({"kv_cache"}));
  EXPECT_EQ(state("weights"), "detached");
  expect_content({"kv_cache"});
  ASSERT_SUCCEEDS(TagSleep(*memory_).wake({}));
  expect_content({"weights", "kv_cache", "runtime"});
}

// vLLM 37065: two engines on one GPU sleep and wake at the same time; one hangs or dies.
TEST_F(PublicFailures, TwoEnginesOnOneGpuTakeTurnsHoweverTheyMeet) {
  const auto other = make();
  ASSERT_SUCCEEDS(TagSleep(*memory_).sleep({}, {"weights"}));
  const DeviceAddress theirs = value_of(other->allocate("weights", "all", 24 * kUnit));
  fill(addresses_.emplace("theirs", theirs).first->second, 't');
  const auto cycle = [](RankMemory& memory, bool asleep) {
    for (int round = 0; round < 40;) {
      if (asleep) {
        if (!TagSleep(memory).wake({})) {
          std::this_thread::yield();  // the other one has the memory
          continue;
        }
      } else {
        EXPECT_TRUE(test::succeeded(TagSleep(memory).sleep({}, {"weights"})));
      }
      asleep = !asleep;
      ++round;
    }
  };
  std::thread first(cycle, std::ref(*memory_), true);
  cycle(*other, false);
  ASSERT_SUCCEEDS(TagSleep(*other).sleep({}, {"weights"}));
  first.join();
  ASSERT_SUCCEEDS(TagSleep(*memory_).wake({}));
  expect_content({"weights"});
}

// slime 579, miles 86: sleep returned before the memory was free, the neighbour ran out of it.
// vLLM 32714: a sleep freed 6 GB instead of more than 20.
TEST_F(PublicFailures, WhenASleepReturnsAllItsMemoryIsFree) {
  EXPECT_EQ(fake_.used_bytes(), 3 * kRegion);
  const TagMove move = value_of(TagSleep(*memory_).sleep({}, {"weights"}));
  EXPECT_EQ(fake_.used_bytes(), 0u);
  EXPECT_EQ(move.physical_bytes, 3 * kRegion);
  give_back(take(32 * kUnit));  // the neighbour gets the whole GPU
  ASSERT_SUCCEEDS(TagSleep(*memory_).wake({}));
}

// cuda-checkpoint 44: a restore that failed once can never be tried again.
TEST_F(PublicFailures, AFailedRestoreCanBeTriedAgain) {
  ASSERT_SUCCEEDS(TagSleep(*memory_).sleep({}, {"weights", "kv_cache", "runtime"}));
  int failures = 0;
  for (uint64_t call = 1;; ++call) {
    fake_.fail(call, CUDA_ERROR_OUT_OF_MEMORY, Lasting::kOnce);
    const bool woke = TagSleep(*memory_).wake({}).has_value();
    const bool fired = fake_.fired();
    fake_.heal();
    if (woke && !fired) break;
    if (woke) {
      ASSERT_SUCCEEDS(TagSleep(*memory_).sleep({}, {"weights", "kv_cache", "runtime"}));
      continue;
    }
    ++failures;  // and the next round tries again
    ASSERT_EQ(state("weights"), "detached") << "call " << call;
  }
  EXPECT_GE(failures, 10);
  expect_content({"weights", "kv_cache", "runtime"});
}

// vLLM 35219, 43990: bits of a freed block become another request's NaN.
TEST_F(PublicFailures, WhatComesBackWithoutContentIsZero) {
  ASSERT_SUCCEEDS(TagSleep(*memory_).sleep({}, {"weights"}));
  ASSERT_SUCCEEDS(TagSleep(*memory_).wake({}));
  EXPECT_EQ(read(addresses_["kv_cache"]), std::string(kRegion, '\0'));
  expect_content({"weights"});
}

}  // namespace
}  // namespace torpor
