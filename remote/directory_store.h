// SPDX-License-Identifier: Apache-2.0
// DirectoryStore: an ObjectStore in a directory that several machines see, on NFS or another shared file system. A key
// is a file; it appears under its name only when it is whole and synced.
#pragma once

#include <memory>

#include "base/file_system.h"
#include "remote/object_store.h"

namespace torpor::remote {

// `file_system` outlives the result. The first key that is put makes the directory if it is not there, readable by its
// owner only.
Result<std::unique_ptr<ObjectStore>> open_directory_store(FileSystem& file_system, const std::string& path);

}  // namespace torpor::remote
