// SPDX-License-Identifier: Apache-2.0
// An EngineCheckpoint as the sections of a checkpoint, and back: Cereal through a bounded archive, so that a hostile or
// damaged section is an error, never a large allocation. The bytes: checkpoint/FORMAT.md.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "checkpoint/engine_checkpoint.h"

namespace torpor {

inline constexpr std::string_view kSetSection = "set";            // of checkpoint_set.h; no state of an engine
inline constexpr std::string_view kMetadataSection = "metadata";  // only where there is some; not required

// The sections "requests", "queues", "block_tables", "blocks", "free_order", "prefix_index", "samplers", "engine",
// "outputs", "metadata" if there is some, and what is carried. The fingerprint is the manifest's.
std::vector<Section> encode(const EngineCheckpoint& checkpoint);
// The reverse, without the fingerprint. kCorruption for a section that is missing, damaged or has bytes left over,
// kIncompatible for an unknown one that is required. Does not call validate().
Result<EngineCheckpoint> decode(std::span<const Section> sections);
Section encode_metadata(const Metadata& metadata);
// Return what the section kMetadataSection has, empty if there is none. Errors: those of decode().
Result<Metadata> decode_metadata(std::span<const Section> sections);

}  // namespace torpor
