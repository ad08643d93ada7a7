// SPDX-License-Identifier: Apache-2.0
// libtorpor_memory.so: the C interface of memory (bindings/memory_c_api.h) as a library of its own, for programs in any
// language. It needs neither Python nor the other libraries of torpor; ctypes of every Python can load it.
//
// Owner, threads and failure: as in bindings/memory_c_api.h.
#include "bindings/process_memory.h"

namespace torpor {

ProcessParts process_parts() { return {.file_system = linux_file_system()}; }

}  // namespace torpor
