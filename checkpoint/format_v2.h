// Checkpoints of version 2, for reading: MANIFEST has each rank's table of records, and an incremental one names files
// of earlier checkpoints where they are, in the same directory, which must stay there.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/file_system.h"
#include "base/status.h"
#include "checkpoint/manifest_codec.h"

namespace torpor::format_v2 {

// Fills manifest and refs. The header was checked and `body` is authentic.
Status decode_body(std::span<const std::byte> body, const SealId& id, OpenedManifest& opened);

// A file of the checkpoint in `directory`: its own, or one of an earlier checkpoint. kCorruption: that one is not
// there, or is another one than was named.
Result<std::unique_ptr<File>> open_file(FileSystem& file_system, const Directory& directory, const LinkedFile& file,
                                        const Key* key);

// Generations of the same directory whose files it names; none for other versions.
std::vector<uint64_t> needs(const Manifest& manifest);

}  // namespace torpor::format_v2
