// SPDX-License-Identifier: Apache-2.0
// HostDevice: DeviceMemory without a GPU, over private memory and reserved addresses. It is a real product path: it
// gives memory back to the system on release, so an engine on the CPU can sleep too.
//
// It is stricter than CUDA where that finds mistakes. Asynchronous copies run late, on one worker thread per stream;
// with `defer_copies` they run only when a call waits for them. So a missing wait shows without a GPU. Tests inject
// failures with tests/support/faulty_device.h.
#pragma once

#include <memory>
#include <string>

#include "allocator/device_memory.h"
#include "allocator/prefault.h"

namespace torpor {

struct HostDeviceOptions {
  uint64_t granularity_bytes = 64 * 1024;  // a power of two, at least the page size
  uint64_t capacity_bytes = 0;             // 0: no limit but the system's
  // Devices of all processes of this machine that name the same file share `capacity_bytes`, as those of one GPU do:
  // none gets memory that another one has (shared_capacity.h). "": this device has them alone.
  std::string shared_file;
  bool defer_copies = false;  // run copies only inside wait() and drain()
  // Without it, mapped memory is in huge pages. With it, memory is in small pages, as malloc's is, until copies fill a
  // whole huge page of it: then this is asked. Copies that are slow afterwards say that huge pages are not worth it,
  // and what is touched later is in small pages, in all memory for a second.
  HugePages huge_pages;
  // Copies below this are slow. A virtual machine that asks its host for huge pages was seen to get 400 MB/s.
  uint64_t slow_bytes_per_second = 600'000'000;
  uint64_t link_bytes_per_second = 0;  // copies take at least this long, each direction by itself; 0: no limit
  uint64_t shuffle_seed = 0;           // not 0: shuffle the copies of each call, in an order that this seed fixes
};

// Make the device. kInvalidArgument: `granularity_bytes` is not a power of two, or is below the page size; a
// `shared_file` without `capacity_bytes`.
Result<std::unique_ptr<DeviceMemory>> make_host_device(HostDeviceOptions options = {});

}  // namespace torpor
