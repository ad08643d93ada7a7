// SPDX-License-Identifier: Apache-2.0
// A chunk file that nobody else sees: for what of a sleep has no room in host memory. It loses its name as soon as it
// exists, so that nothing of it is left when it is closed, or when the process ends in whatever way.
#pragma once

#include <memory>
#include <string>

#include "base/file_system.h"
#include "base/seal.h"
#include "offload/record_store.h"

namespace torpor {

// `directory` is made if it is absent. With a key (may be null) every chunk is authenticated, with `encrypt`
// unreadable.
Result<std::unique_ptr<RecordStore>> make_spill_file(FileSystem& file_system, const std::string& directory,
                                                     int32_t rank, const Key* key, bool encrypt);

}  // namespace torpor
