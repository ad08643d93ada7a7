// Names inside a directory of checkpoints, and reading one of its entries.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/file_system.h"
#include "checkpoint/checkpoint_manager.h"

namespace torpor {

inline constexpr std::string_view kManifestFile = "MANIFEST";
inline constexpr std::string_view kStateFile = "STATE";
inline constexpr std::string_view kLockFile = "LOCK";
inline constexpr std::string_view kGenerationPrefix = "g-";  // committed
inline constexpr std::string_view kStagingPrefix = "s-";     // under construction
inline constexpr std::string_view kTrashPrefix = "t-";       // being removed

std::string generation_name(uint64_t generation);                      // "g-000042"
std::optional<uint64_t> generation_of(std::string_view entry_name);    // no value for other names

Result<Manifest> read_manifest(Directory& directory);
Result<Checkpoint> open_checkpoint_directory(std::unique_ptr<Directory> directory);

}  // namespace torpor
