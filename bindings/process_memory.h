// SPDX-License-Identifier: Apache-2.0
// The MemorySaver of this process, for the C ABI of memory and for Python, with settings from the environment
// (docs/memory.md).
//
// Owner: the process. The saver is never destroyed, as other code may free memory until the very end of the process.
// Threads: any. Failure: an invalid setting fails the first allocation with an error that names the variable.
#pragma once

#include <memory>

#include "base/event.h"
#include "base/file_system.h"
#include "engine/memory_saver.h"

namespace torpor {

// Return the saver. It uses the GPUs of the machine; with TORPOR_MEMORY_DEVICE=host in the environment, the device
// without a GPU.
MemorySaver& memory_saver();
// Make the device of this ordinal, as memory_saver() uses it.
Result<std::unique_ptr<DeviceMemory>> make_process_device(int ordinal);

// Return whether backups are kept after a wake. Set it before the first memory is allocated.
bool backups_kept();
Status set_backups_kept(bool kept);

// The parts that differ between the libraries that contain the saver. Each library defines process_parts() once: the
// Python module in bind_memory.cpp, the C library in memory_library/memory_library.cpp.
struct ProcessParts {
  FileSystem& file_system;
  EventPort events{};
};
ProcessParts process_parts();

}  // namespace torpor
