// SPDX-License-Identifier: Apache-2.0
// Host memory that is prefaulted for a GPU: beside serving, beside a capture of CUDA graphs, and in the middle of a
// first sleep.
#include <future>
#include <thread>

#include <sched.h>

#include "allocator/background_prefault.h"
#include "allocator/cuda/cuda_device.h"
#include "base/units.h"
#include "tests/support/fake_cuda_driver.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::FakeCuda;
using test::value_of;
using Lasting = FakeCuda::Lasting;
using namespace std::chrono_literals;

// A device whose driver refuses to pin, as beside a capture, until heal().
class CudaPrefault : public ::testing::Test {
 protected:
  CudaPrefault() : device_(value_of(make_cuda_device(fake_.driver(), {}))) {}
  void refuse_to_pin(HostArena& arena, uint64_t bytes) {
    fake_.fail(3, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, Lasting::kForever);  // context, mode, then the pin
    EXPECT_SUCCEEDS(arena.prefault(bytes));
    EXPECT_EQ(fake_.failed_function(), "cuMemHostRegister");
    EXPECT_EQ(arena.info().unpinned_bytes, bytes);
    fake_.heal();
  }
  std::unique_ptr<HostArena> make_arena(uint64_t slab_bytes = 2 * kMiB) {
    return value_of(HostArena::create({.slab_bytes = slab_bytes, .piece_bytes = 8 * kMiB, .pin_for = device_.get()}));
  }
  FakeCuda fake_;
  std::unique_ptr<DeviceMemory> device_;
};

TEST_F(CudaPrefault, WhatCouldNotBePinnedAtThatMomentIsPinnedLater) {
  const auto arena = make_arena();
  refuse_to_pin(*arena, 4 * kMiB);
  EXPECT_SUCCEEDS(arena->prefault(4 * kMiB));  // there already
  EXPECT_EQ(arena->info().unpinned_bytes, 0u);
  EXPECT_EQ(arena->trim(), 4 * kMiB);
  refuse_to_pin(*arena, 4 * kMiB);
  EXPECT_EQ(value_of(arena->prefault_slowly(4 * kMiB, [](uint64_t) { return true; })), 0u);
  EXPECT_EQ(arena->info().unpinned_bytes, 0u);
}

TEST_F(CudaPrefault, WhatIsInUseIsPinnedWhenItHasComeBack) {
  const auto arena = make_arena();
  refuse_to_pin(*arena, 4 * kMiB);
  HostArena::Span span = value_of(arena->allocate(kMiB));
  arena->trim(kGiB);
  EXPECT_EQ(arena->info().unpinned_bytes, 4 * kMiB);  // a copy may be on its way there
  span = {};
  arena->trim(kGiB);
  EXPECT_EQ(arena->info().unpinned_bytes, 0u);
  EXPECT_EQ(arena->info().held_bytes, 4 * kMiB);
  EXPECT_FALSE(value_of(arena->allocate(4 * kMiB)).empty());
}

TEST_F(CudaPrefault, WhatTheDeviceWillNeverPinIsNotTriedAgain) {
  const auto arena = make_arena();
  fake_.fail(3, CUDA_ERROR_OUT_OF_MEMORY, Lasting::kForever);
  EXPECT_SUCCEEDS(arena->prefault(2 * kMiB));
  fake_.heal();
  arena->trim(kGiB);
  EXPECT_EQ(arena->info().unpinned_bytes, 2 * kMiB);
}

TEST_F(CudaPrefault, TheQuietOneHoldsTheDriversLockForASmallPieceAtMost) {
  fake_.forget_cost();
  ASSERT_SUCCEEDS(device_->pin_host({reinterpret_cast<std::byte*>(uint64_t{1} << 46), 8 * kMiB}));  // never touched
  const uint64_t of_a_piece = fake_.cost().longest_locked;
  ASSERT_SUCCEEDS(device_->unpin_host({reinterpret_cast<std::byte*>(uint64_t{1} << 46), 8 * kMiB}));
  const auto arena = make_arena(64 * kMiB);
  fake_.forget_cost();
  bool stood_back = false;
  BackgroundPrefault quiet(*arena, [&] {
    stood_back = stood_back || ::sched_getscheduler(0) == SCHED_IDLE;
    return kGiB;
  });
  quiet.want(20 * kMiB);
  quiet.wait();
  EXPECT_EQ(arena->info().held_bytes, 20 * kMiB);
  EXPECT_EQ(arena->info().unpinned_bytes, 0u);
  EXPECT_EQ(fake_.cost().longest_locked, of_a_piece);
  EXPECT_FALSE(stood_back);  // who pins; the fake writes it down as well
}

TEST_F(CudaPrefault, ItSpoilsNoCapture) {
  const auto arena = make_arena(4 * kMiB);
  (void)fake_.begin_capture();
  BackgroundPrefault quiet(*arena, [] { return kGiB; });
  quiet.want(8 * kMiB);
  quiet.wait();
  EXPECT_EQ(arena->info().unpinned_bytes, 0u);
  EXPECT_EQ(fake_.end_capture(), CUDA_SUCCESS);
}

TEST_F(CudaPrefault, MemoryThatIsMissingComesInPiecesWhileTheFirstIsUsed) {
  const auto arena = make_arena();
  fake_.hold("cuMemHostRegister", 1);  // the second piece is slow to come
  HostArena::Ahead ahead = value_of(arena->prefault_ahead(20 * kMiB));
  fake_.wait_until_held();
  std::vector<HostArena::Span> spans;
  for (int i = 0; i < 2; ++i) spans.push_back(value_of(arena->allocate(4 * kMiB)));
  std::future<HostArena::Span> third =
      std::async(std::launch::async, [&] { return value_of(arena->allocate(4 * kMiB)); });
  EXPECT_EQ(arena->info().held_bytes, 8 * kMiB);
  fake_.resume();
  spans.push_back(third.get());
  for (int i = 0; i < 2; ++i) spans.push_back(value_of(arena->allocate(4 * kMiB)));
  ahead = {};
  EXPECT_EQ(arena->info().held_bytes, 20 * kMiB);
  EXPECT_EQ(fake_.counts()["cuMemHostRegister"], 3u);
}

TEST_F(CudaPrefault, NearTheBudgetAllOfItComesAtOnce) {
  const auto arena = value_of(HostArena::create(
      {.budget_bytes = 20 * kMiB, .slab_bytes = 2 * kMiB, .piece_bytes = 8 * kMiB, .pin_for = device_.get()}));
  const HostArena::Ahead ahead = value_of(arena->prefault_ahead(20 * kMiB));
  EXPECT_EQ(arena->info().held_bytes, 20 * kMiB);
  EXPECT_EQ(fake_.counts()["cuMemHostRegister"], 1u);
  EXPECT_FALSE(value_of(arena->allocate(20 * kMiB)).empty());
  EXPECT_FAILS(arena->prefault_ahead(21 * kMiB), Code::kResourceExhausted);
}

TEST_F(CudaPrefault, WhoNeedsNoMoreEndsIt) {
  for (int round = 0; round < 20; ++round) {
    const auto arena = make_arena();
    (void)value_of(arena->prefault_ahead(64 * kMiB));
    EXPECT_GE(arena->info().held_bytes, 8 * kMiB);
  }
}

}  // namespace
}  // namespace torpor
