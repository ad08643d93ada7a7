// SPDX-License-Identifier: Apache-2.0
// Turns an EngineCheckpoint into the sections of a checkpoint, and back. It uses Cereal through a bounded archive, so a
// hostile or damaged section is an error and never a large allocation. checkpoint/FORMAT.md has the bytes.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "checkpoint/engine_checkpoint.h"

namespace torpor {

inline constexpr std::string_view kSetSection = "set";  // of checkpoint_set.h; has no state of an engine
// A checkpoint with metadata has one of these two, and does not require it: the second if a value is no text.
inline constexpr std::string_view kMetadataSection = "metadata";
inline constexpr std::string_view kMetadataJsonSection = "metadata_json";
inline bool is_metadata(std::string_view section) {
  return section == kMetadataSection || section == kMetadataJsonSection;
}

// Encode the sections "requests", "queues", "block_tables", "blocks", "free_order", "prefix_index", "samplers",
// "engine", "outputs", the metadata's (if there is any), and the carried ones. The fingerprint is in the manifest.
std::vector<Section> encode(const EngineCheckpoint& checkpoint);
// Decode the sections; does not set the fingerprint and does not call validate(). kCorruption: a section is missing,
// damaged, or has bytes left over. kIncompatible: an unknown section is required.
Result<EngineCheckpoint> decode(std::span<const Section> sections);
Section encode_metadata(const Metadata& metadata);
// Decode the section of the metadata; empty if there is none. Errors: those of decode().
Result<Metadata> decode_metadata(std::span<const Section> sections);

}  // namespace torpor
