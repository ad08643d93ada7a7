// Files of checkpoints of version 2: an incremental one names those of earlier checkpoints of the same directory, which
// must stay there.
#pragma once

#include <memory>
#include <vector>

#include "base/file_system.h"
#include "base/status.h"
#include "checkpoint/manifest.h"

namespace torpor::format_v2 {

// A file of the checkpoint in `directory`: its own, or one of an earlier checkpoint. kCorruption: that one is not
// there, or is another one than was named.
Result<std::unique_ptr<File>> open_file(FileSystem& file_system, const Directory& directory, const LinkedFile& file,
                                        const Key* key);

// Generations of the same directory whose files it names; none for other versions.
std::vector<uint64_t> needs(const Manifest& manifest);

}  // namespace torpor::format_v2
