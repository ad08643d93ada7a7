// SPDX-License-Identifier: Apache-2.0
// Names inside a directory of checkpoints, and what reader and writer of a checkpoint share.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/file_system.h"
#include "checkpoint/manifest_codec.h"

namespace torpor {

inline constexpr std::string_view kManifestFile = "MANIFEST";
inline constexpr std::string_view kStateFile = "STATE";
inline constexpr std::string_view kWokenFile = "WOKEN";  // this checkpoint was woken from, and that went well
inline constexpr std::string_view kLockFile = "LOCK";
inline constexpr std::string_view kGenerationPrefix = "g-";  // committed
inline constexpr std::string_view kStagingPrefix = "s-";     // under construction
inline constexpr std::string_view kTrashPrefix = "t-";       // being removed

// What to do where a rank's host does not see the directory of the others.
inline constexpr const char* kShareIt =
    "let the hosts of all ranks share the directory, at the same path, or sleep to host memory";

inline constexpr uint64_t kMostExpansion =
    1024;  // of a section by decompression: a writer keeps to it, a reader refuses more

std::string generation_name(uint64_t generation);                    // "g-000042"
std::optional<uint64_t> generation_of(std::string_view entry_name);  // no value for other names

Result<std::vector<uint64_t>> generations_in(const Directory& store);  // committed, oldest first
// kCorruption where the file is larger than `most`, before memory is taken.
Result<Bytes> read_whole(const Directory& directory, std::string_view name, uint64_t most);
Result<OpenedManifest> read_manifest(const Directory& directory, const Key* key = nullptr);
SealPlace section_place(const SectionInfo& info);

}  // namespace torpor
