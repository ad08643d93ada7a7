// SPDX-License-Identifier: Apache-2.0
// FakeCuda: captures of streams, pinned memory as the device sees it, and prices.
#include <algorithm>

#include "tests/support/fake_cuda_driver.h"
#include "tests/support/fake_cuda_handles.h"

namespace torpor::test {

CUstream FakeCuda::begin_capture(CUstreamCaptureMode mode, CUstream stream) {
  const std::lock_guard lock(mutex_);
  const uint64_t id = stream == nullptr ? next_id_++ : number(stream);
  captures_.push_back({.stream = id, .thread = std::this_thread::get_id(), .mode = mode});
  return handle<CUstream>(id);
}

CUresult FakeCuda::end_capture() {
  const std::lock_guard lock(mutex_);
  const auto own = std::find_if(captures_.begin(), captures_.end(),
                                [](const Capture& each) { return each.thread == std::this_thread::get_id(); });
  if (own == captures_.end()) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
  const bool spoiled = own->spoiled;
  captures_.erase(own);
  return spoiled ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
}

CUresult FakeCuda::spoil(Capture& capture, CUresult result) {
  capture.spoiled = true;
  return result;
}

// Refuse an unsafe call beside an own capture that is not relaxed; in global mode also beside another thread's global
// capture.
CUresult FakeCuda::beside_captures(bool whole_context) {
  CUresult result = CUDA_SUCCESS;
  for (Capture& capture : captures_) {
    const bool own = capture.thread == std::this_thread::get_id();
    const bool forbids =
        own ? capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED
            : capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
    if (whole_context || (forbids && capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED))
      result = spoil(capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  }
  return result;
}

CUresult FakeCuda::use_of_stream(uint64_t stream) {
  for (Capture& capture : captures_) {
    if (capture.stream == stream) return spoil(capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  }
  return CUDA_SUCCESS;
}

CUstreamCaptureMode FakeCuda::capture_mode_of_this_thread() const { return capture_mode; }

bool FakeCuda::is_pinned(const std::byte* host, uint64_t bytes) const {
  auto pinned = pinned_.upper_bound(host);
  return pinned != pinned_.begin() && host + bytes <= (--pinned)->first + pinned->second;
}

CUdeviceptr FakeCuda::device_pointer(const void* host) const {
  const std::lock_guard lock(mutex_);
  if (!is_pinned(static_cast<const std::byte*>(host), 1)) return 0;
  return number(host) + (options_.host_pointers ? 0 : kDeviceView);
}

void FakeCuda::charge(const std::string& function, uint64_t nanoseconds, bool locks) {
  cost_.host += nanoseconds;
  cost_.by_function[function] += nanoseconds;
  if (!locks) return;
  cost_.locked += nanoseconds;
  cost_.longest_locked = std::max(cost_.longest_locked, nanoseconds);
}

FakeCudaCost FakeCuda::cost() const {
  const std::lock_guard lock(mutex_);
  return cost_;
}

void FakeCuda::forget_cost() {
  const std::lock_guard lock(mutex_);
  cost_ = {};
}

}  // namespace torpor::test
