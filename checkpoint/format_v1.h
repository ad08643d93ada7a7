// Format version 1, read only: what was other than today. Checked by the checkpoint in tests/golden/v1.
//
// In version 1 the manifest had an unkeyed XXH3-128 instead of BLAKE2b, no id and no fingerprint; a rank had one file;
// the section "fingerprint" held the fingerprint, and "blocks" held tables, blocks and free order together.
#pragma once

#include "checkpoint/engine_checkpoint.h"
#include "checkpoint/manifest.h"

namespace torpor {

// The whole file MANIFEST; the caller has checked magic, version and byte order.
Result<Manifest> decode_manifest_v1(std::span<const std::byte> file);
Result<EngineCheckpoint> decode_v1(std::span<const Section> sections);

}  // namespace torpor
