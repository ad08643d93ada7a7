// SPDX-License-Identifier: Apache-2.0
// HostDevice: DeviceMemory without a GPU, over private memory and reserved addresses. It is a real product path: it
// gives memory back to the system on release, so an engine on the CPU can sleep too.
//
// It is stricter than CUDA where that finds mistakes. Asynchronous copies run late, on one worker thread per stream;
// with `defer_copies` they run only when a call waits for them. So a missing wait shows without a GPU. Tests inject
// failures with tests/support/faulty_device.h.
#pragma once

#include <memory>

#include "allocator/device_memory.h"
#include "allocator/prefault.h"

namespace torpor {

struct HostDeviceOptions {
  uint64_t granularity_bytes = 64 * 1024;  // a power of two, at least the page size
  uint64_t capacity_bytes = 0;             // 0: no limit but the system's
  bool defer_copies = false;               // run copies only inside wait() and drain()
  // If it is set, memory that is mapped at an address for the first time is in small pages, as malloc's is, and it is
  // asked for later memory, as that of a wake.
  HugePages huge_pages;
  uint64_t link_bytes_per_second = 0;  // copies take at least this long, each direction by itself; 0: no limit
  uint64_t shuffle_seed = 0;           // not 0: shuffle the copies of each call, in an order that this seed fixes
};

// Make the device. kInvalidArgument: `granularity_bytes` is not a power of two, or is below the page size.
Result<std::unique_ptr<DeviceMemory>> make_host_device(HostDeviceOptions options = {});

}  // namespace torpor
