// MANIFEST of version 2, for reading: it has each rank's table of records itself, and names files of earlier
// checkpoints where they are (checkpoint/format_v2_files.h).
#pragma once

#include <cstddef>
#include <span>

#include "base/status.h"
#include "checkpoint/manifest.h"

namespace torpor::format_v2 {

// Fills manifest and refs. The header was checked and `body` is authentic.
Status decode_body(std::span<const std::byte> body, const SealId& id, OpenedManifest& opened);

}  // namespace torpor::format_v2
