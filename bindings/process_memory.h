// The MemorySaver of this process, for its C ABI and for Python.
#pragma once

#include "engine/memory_saver.h"

namespace torpor {

// On the GPUs of the machine, or, with TORPOR_MEMORY_DEVICE=host in the environment, on the device without a GPU. Never
// destroyed: what is above may free memory until the very end of the process.
MemorySaver& memory_saver();
// Whether its backups are kept after a wake. It is said before the first memory is taken.
bool backups_kept();
Status set_backups_kept(bool kept);

}  // namespace torpor
