// SPDX-License-Identifier: Apache-2.0
// Current: makes a device's context current for a driver call. Also: errors as values, and a second try for calls that
// release something.
#pragma once

#include <fmt/core.h>

#include "allocator/cuda/driver.h"
#include "base/status.h"

namespace torpor {

// Return whether a result may be an error of earlier work, reported by a later call. The context is lost then, and the
// call that reports it may have done its work.
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

// Run a call that releases something, and once more if it fails: it has no alternative, and a driver that was short of
// something may do it the second time. After a sticky error do not retry: the call may have released it, and it must
// not be released twice.
template <class Call>
CUresult twice(const Call& call) {
  const CUresult result = call();
  return result == CUDA_SUCCESS || is_sticky(result) ? result : call();
}

// Makes a context current for a scope and allows calls that are unsafe during a stream capture. vLLM captures CUDA
// graphs in the mode that concerns all threads: the driver refuses unsafe calls of each thread that is not in relaxed
// mode, and the capture is lost. torpor's work never belongs into a graph. If the mode cannot be exchanged, the call
// continues without.
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

// Run a driver call in the device's context; if it fails, return its error from the enclosing function. For members of
// a class with driver_, context_ and kind_.
#define TORPOR_CUDA_TRY(call, ...)                                            \
  do {                                                                        \
    if (const CUresult torpor_result = (call); torpor_result != CUDA_SUCCESS) \
      return cuda_error(driver_, torpor_result, fmt::format(__VA_ARGS__));    \
  } while (false)
#define TORPOR_CUDA_CURRENT()                      \
  const Current torpor_current(driver_, context_); \
  TORPOR_CUDA_TRY(torpor_current.result(), "making the context of {} current", kind_)

}  // namespace torpor
