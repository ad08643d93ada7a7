// SPDX-License-Identifier: Apache-2.0
// A chunk file for what does not fit into host memory at a sleep. Its name is removed as soon as it exists, so no other
// process sees it, and nothing of it is left when it is closed or the process ends in any way.
#pragma once

#include <memory>
#include <string>

#include "base/file_system.h"
#include "base/seal.h"
#include "offload/record_store.h"

namespace torpor {

// Make the file in `directory`, which is made if it is absent. With a key (may be null) every chunk is authenticated;
// with `encrypt` it is also encrypted. Errors: those of the file system.
Result<std::unique_ptr<RecordStore>> make_spill_file(FileSystem& file_system, const std::string& directory,
                                                     int32_t rank, const Key* key, bool encrypt);

}  // namespace torpor
