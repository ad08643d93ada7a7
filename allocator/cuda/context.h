// SPDX-License-Identifier: Apache-2.0
// What every call of the driver needs: its context current, its errors as values, and another try for what takes down.
#pragma once

#include <fmt/core.h>

#include "allocator/cuda/driver.h"
#include "base/status.h"

namespace torpor {

// Errors of earlier work that any call may report, done or not; the context is lost with them.
inline bool is_sticky(CUresult result) {
  switch (result) {
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED: return true;
    default: return false;
  }
}

// What takes down has no alternative, and a driver that is short of something for a moment may do it the next time. Not
// after a sticky error: the call may have done its work, and what it took down must not be taken down again.
template <class Call>
CUresult twice(const Call& call) {
  const CUresult result = call();
  return result == CUDA_SUCCESS || is_sticky(result) ? result : call();
}

// Makes a context current for the time of a call, and lets the thread make calls that are unsafe beside a capture of a
// stream: while vLLM captures CUDA graphs, in the mode that concerns all threads, the driver refuses such calls of
// every thread that is not relaxed, and the capture is lost. No work of torpor's belongs into a graph. Where the mode
// cannot be exchanged the call goes on without.
class Current {
 public:
  Current(const CudaDriver& driver, CUcontext context)
      : driver_(driver), result_(twice([&] { return driver.cuCtxPushCurrent(context); })) {
    exchanged_ = result_ == CUDA_SUCCESS && driver.cuThreadExchangeStreamCaptureMode(&mode_) == CUDA_SUCCESS;
  }
  ~Current() {
    CUcontext popped = nullptr;
    if (exchanged_) (void)twice([&] { return driver_.cuThreadExchangeStreamCaptureMode(&mode_); });
    if (result_ == CUDA_SUCCESS) (void)twice([&] { return driver_.cuCtxPopCurrent(&popped); });
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  CUresult result() const { return result_; }

 private:
  const CudaDriver& driver_;
  const CUresult result_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;  // then the caller's
  bool exchanged_ = false;
};

inline Error unknown_id(std::string_view what, uint64_t id) {
  return Error{
      .code = Code::kInvalidArgument, .what = fmt::format("{} {} does not exist", what, id), .origin = Origin::kDevice};
}

// Runs a driver call in the device's context; returns its error from the enclosing function. For members of a class
// with driver_, context_ and kind_.
#define TORPOR_CUDA_TRY(call, ...)                                            \
  do {                                                                        \
    if (const CUresult torpor_result = (call); torpor_result != CUDA_SUCCESS) \
      return cuda_error(driver_, torpor_result, fmt::format(__VA_ARGS__));    \
  } while (false)
#define TORPOR_CUDA_CURRENT()                      \
  const Current torpor_current(driver_, context_); \
  TORPOR_CUDA_TRY(torpor_current.result(), "making the context of {} current", kind_)

}  // namespace torpor
