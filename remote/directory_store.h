// SPDX-License-Identifier: Apache-2.0
// DirectoryStore: an ObjectStore in a directory that several machines share, on NFS or another shared file system. A
// key is a file; the file gets its name only after it is whole and synced.
//
// Threads and errors: as ObjectStore.
#pragma once

#include <memory>

#include "base/file_system.h"
#include "remote/object_store.h"

namespace torpor::remote {

// Open the store at `path`. `file_system` outlives the result. If the directory does not exist, the first put creates
// it, readable by its owner only.
Result<std::unique_ptr<ObjectStore>> open_directory_store(FileSystem& file_system, const std::string& path);

}  // namespace torpor::remote
