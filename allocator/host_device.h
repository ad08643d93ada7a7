// SPDX-License-Identifier: Apache-2.0
// HostDevice: DeviceMemory without a GPU, over private memory and reserved addresses. A real product path: it gives
// memory back to the system on release, so an engine on the CPU can sleep too.
//
// Stricter than CUDA where that finds mistakes: asynchronous copies run late, on a worker thread per stream and, with
// `defer_copies`, only when somebody waits, so that a missing wait shows on a laptop. Failures by script: the test
// double tests/support/faulty_device.h.
#pragma once

#include <functional>
#include <memory>

#include "allocator/device_memory.h"

namespace torpor {

struct HostDeviceOptions {
  uint64_t granularity_bytes = 64 * 1024;  // a power of two, at least the page size
  uint64_t capacity_bytes = 0;             // 0: as much as the system gives
  bool defer_copies = false;               // run copies only inside wait()
  bool huge_pages = true;                  // ask for transparent huge pages; the system may decline
  uint64_t link_bytes_per_second = 0;      // copies take at least this long, each direction alone; 0: as fast as memory
  uint64_t shuffle_seed = 0;  // not 0: the copies of one call are done in some other order, fixed by the seed
};

// kInvalidArgument for a bad granularity.
Result<std::unique_ptr<DeviceMemory>> make_host_device(HostDeviceOptions options = {});

}  // namespace torpor
