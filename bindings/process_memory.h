// SPDX-License-Identifier: Apache-2.0
// The MemorySaver of this process, for the C interface of memory and for Python, with the settings that the environment
// gives (docs/memory.md).
//
// Owner: the process; the saver is never destroyed, for what is above may free memory until the very end of the
// process. Threads: any. Failure: a setting that makes no sense fails the first allocation, and names the variable.
#pragma once

#include <memory>

#include "base/event.h"
#include "base/file_system.h"
#include "engine/memory_saver.h"

namespace torpor {

// On the GPUs of the machine, or, with TORPOR_MEMORY_DEVICE=host in the environment, on the device without a GPU.
MemorySaver& memory_saver();
// Return the device of this ordinal, as memory_saver() has it.
Result<std::unique_ptr<DeviceMemory>> make_process_device(int ordinal);

// Return whether backups are kept after a wake. Set it before the first memory is taken.
bool backups_kept();
Status set_backups_kept(bool kept);

// Parts that depend on the library which carries the saver. Each library defines the function once: the Python module
// in bind_memory.cpp, the C library in memory_library/memory_library.cpp.
struct ProcessParts {
  FileSystem& file_system;
  EventPort events{};
};
ProcessParts process_parts();

}  // namespace torpor
