// SPDX-License-Identifier: Apache-2.0
// Beside a capture of a CUDA graph: what the fake driver refuses, and that no call of torpor's is refused or spoils the
// capture.
#include <future>
#include <thread>

#include "allocator/cuda/cuda_device.h"
#include "allocator/host_arena.h"
#include "base/units.h"
#include "tests/support/fake_cuda_driver.h"
#include "tests/support/results.h"

namespace torpor {
namespace {

using test::FakeCuda;
using test::value_of;

// Runs `work` on another thread while this one captures; returns how the capture ended.
CUresult beside_capture(FakeCuda& fake, CUstreamCaptureMode mode, const std::function<void()>& work) {
  (void)fake.begin_capture(mode);
  std::thread(work).join();
  return fake.end_capture();
}

// A user of the driver without torpor: a stream, an event and pinned memory.
class FakeCudaCaptures : public ::testing::Test {
 protected:
  FakeCudaCaptures() : memory_(2 * kMiB), driver_(fake_.driver()) {
    EXPECT_EQ(driver_.cuDevicePrimaryCtxRetain(&context_, 0), CUDA_SUCCESS);
    push();
    EXPECT_EQ(driver_.cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    EXPECT_EQ(driver_.cuEventCreate(&event_, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
    EXPECT_EQ(driver_.cuEventRecord(event_, stream_), CUDA_SUCCESS);
  }
  void push() { EXPECT_EQ(driver_.cuCtxPushCurrent(context_), CUDA_SUCCESS); }
  static CUstreamCaptureMode exchange(const CudaDriver& driver, CUstreamCaptureMode mode) {
    EXPECT_EQ(driver.cuThreadExchangeStreamCaptureMode(&mode), CUDA_SUCCESS);
    return mode;
  }
  FakeCuda fake_;
  std::vector<std::byte> memory_;
  const CudaDriver& driver_;
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
  CUevent event_ = nullptr;
};

TEST_F(FakeCudaCaptures, UnsafeCallsOfOtherThreadsAreRefusedUnlessRelaxed) {
  const std::vector<std::function<CUresult()>> unsafe = {
      [&] { return driver_.cuMemHostRegister(memory_.data(), memory_.size(), 0); },
      [&] { return driver_.cuMemHostUnregister(memory_.data()); },
      [&] { return driver_.cuStreamSynchronize(stream_); },
      [&] { return driver_.cuEventSynchronize(event_); },
  };
  for (const auto& call : unsafe) {
    EXPECT_EQ(beside_capture(fake_, CU_STREAM_CAPTURE_MODE_GLOBAL,
                             [&] {
                               push();
                               EXPECT_EQ(call(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
                             }),
              CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  }
  for (const auto& call : unsafe) {
    const auto relaxed = [&] {
      push();
      EXPECT_EQ(exchange(driver_, CU_STREAM_CAPTURE_MODE_RELAXED), CU_STREAM_CAPTURE_MODE_GLOBAL);
      EXPECT_EQ(call(), CUDA_SUCCESS);
    };
    EXPECT_EQ(beside_capture(fake_, CU_STREAM_CAPTURE_MODE_GLOBAL, relaxed), CUDA_SUCCESS);
    const auto plain = [&] {
      push();
      const CUresult result = call();  // of a capture that concerns its own thread alone
      EXPECT_NE(result, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    };
    EXPECT_EQ(beside_capture(fake_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, plain), CUDA_SUCCESS);
  }
  (void)driver_.cuMemHostUnregister(memory_.data());
}

TEST_F(FakeCudaCaptures, TheThreadThatCapturesIsRefusedToo) {
  for (const auto mode : {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL}) {
    (void)fake_.begin_capture(mode);
    EXPECT_EQ(driver_.cuStreamSynchronize(stream_), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    EXPECT_EQ(fake_.end_capture(), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  }
  (void)fake_.begin_capture(CU_STREAM_CAPTURE_MODE_RELAXED);
  EXPECT_EQ(driver_.cuStreamSynchronize(stream_), CUDA_SUCCESS);
  EXPECT_EQ(fake_.end_capture(), CUDA_SUCCESS);
  EXPECT_EQ(fake_.end_capture(), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
}

TEST_F(FakeCudaCaptures, WhatConflictsWithTheCaptureItselfIsNeverAllowed) {
  CUevent inside = nullptr;
  ASSERT_EQ(driver_.cuEventCreate(&inside, 0), CUDA_SUCCESS);
  const std::vector<std::function<CUresult()>> conflicts = {
      [&] { return driver_.cuStreamSynchronize(stream_); },
      [&] { return driver_.cuCtxSynchronize(); },
      [&] {
        EXPECT_EQ(driver_.cuEventRecord(inside, stream_), CUDA_SUCCESS);
        return driver_.cuEventSynchronize(inside);
      },
  };
  exchange(driver_, CU_STREAM_CAPTURE_MODE_RELAXED);
  for (const auto& call : conflicts) {
    (void)fake_.begin_capture(CU_STREAM_CAPTURE_MODE_RELAXED, stream_);
    EXPECT_NE(call(), CUDA_SUCCESS);
    EXPECT_EQ(fake_.end_capture(), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  }
}

// torpor's own calls, from a thread of its own and from the one that captures: as torch allocates there.
TEST(CudaCapture, NoCallOfTheDeviceSpoilsOne) {
  FakeCuda fake;
  const auto device = value_of(make_cuda_device(fake.driver(), {}));
  const uint64_t unit = device->granularity();
  std::vector<std::byte> host(unit, std::byte{7});
  const auto use = [&] {
    const DeviceAddress address = value_of(device->reserve(unit));
    const PhysicalId id = value_of(device->create(unit));
    EXPECT_SUCCEEDS(device->map(address, id));
    EXPECT_SUCCEEDS(device->set_access(address, unit, Access::kReadWrite));
    const StreamId stream = value_of(device->create_stream());
    for (const bool pinned : {false, true}) {
      if (pinned) {
        EXPECT_SUCCEEDS(device->pin_host(host));
      }
      const Copy copies[] = {{address, host.data(), unit / 2}, {address + unit / 2, host.data() + unit / 2, unit / 2}};
      EXPECT_SUCCEEDS(device->copy_async(stream, Direction::kHostToDevice, copies));
      EXPECT_EQ(device->wait(value_of(device->record(stream))).drain, Drain::kCompleted);
      EXPECT_EQ(device->drain(stream).drain, Drain::kCompleted);
    }
    EXPECT_SUCCEEDS(device->unpin_host(host));
    EXPECT_SUCCEEDS(device->destroy_stream(stream));
    EXPECT_SUCCEEDS(device->unmap(address, unit));
    EXPECT_SUCCEEDS(device->release(id));
    EXPECT_SUCCEEDS(device->free_reservation(address));
  };
  EXPECT_EQ(beside_capture(fake, CU_STREAM_CAPTURE_MODE_GLOBAL, use), CUDA_SUCCESS);
  (void)fake.begin_capture();
  use();
  EXPECT_EQ(fake.end_capture(), CUDA_SUCCESS);
  EXPECT_EQ(fake.capture_mode_of_this_thread(), CU_STREAM_CAPTURE_MODE_GLOBAL);  // put back
}

TEST(CudaCapture, AWaitForTheWholeDeviceSaysThatItMayBeTriedLater) {
  FakeCuda fake;
  const auto device = value_of(make_cuda_device(fake.driver(), {}));
  (void)fake.begin_capture();
  EXPECT_FAILS(device->synchronize(), Code::kUnavailable, "900");
  EXPECT_EQ(fake.end_capture(), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_SUCCEEDS(device->synchronize());
}

TEST(CudaCapture, WhereTheModeCannotBeExchangedCallsGoOn) {
  FakeCuda fake;
  const auto device = value_of(make_cuda_device(fake.driver(), {}));
  fake.fail(2, CUDA_ERROR_UNKNOWN, FakeCuda::Lasting::kForever);
  const DeviceAddress address = value_of(device->reserve(device->granularity()));
  EXPECT_EQ(fake.failed_function(), "cuThreadExchangeStreamCaptureMode");
  EXPECT_SUCCEEDS(device->free_reservation(address));
  fake.heal();
}

}  // namespace
}  // namespace torpor
