// SPDX-License-Identifier: Apache-2.0
// Handles of the fake driver: they are numbers.
#pragma once

#include <cstdint>
#include <vector>

#include "allocator/cuda/driver.h"

namespace torpor::test {

inline uint64_t number(const void* handle) { return reinterpret_cast<uint64_t>(handle); }
template <class Handle>
Handle handle(uint64_t number) {
  return reinterpret_cast<Handle>(number);  // NOLINT(performance-no-int-to-ptr)
}

inline bool overlap(uint64_t a, uint64_t a_size, uint64_t b, uint64_t b_size) {
  return a < b + b_size && b < a + a_size;
}

// The contexts that this thread has pushed, and its capture mode.
inline thread_local std::vector<CUcontext> contexts;
inline thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

// The distance between a host address and the device's address of the same registered memory, if they differ. It is
// beyond all addresses of processes and of the fake's devices.
inline constexpr uint64_t kDeviceView = uint64_t{1} << 52;

}  // namespace torpor::test
