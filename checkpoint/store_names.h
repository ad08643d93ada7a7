// SPDX-License-Identifier: Apache-2.0
// Names inside a directory of checkpoints, and functions that readers and writers share.
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
inline constexpr std::string_view kWokenFile = "WOKEN";    // an engine woke from this checkpoint successfully
inline constexpr std::string_view kAsleepFile = "ASLEEP";  // locked while an engine sleeps on this checkpoint
inline constexpr std::string_view kLockFile = "LOCK";
inline constexpr std::string_view kAnswersFolder = "answers";  // a server's response log, and the page of its owner
inline constexpr std::string_view kGenerationPrefix = "g-";    // committed
inline constexpr std::string_view kStagingPrefix = "s-";       // under construction
inline constexpr std::string_view kTrashPrefix = "t-";         // being removed
inline constexpr std::string_view kPullPrefix = "s-pull-";     // a checkpoint that is being pulled; then its id
inline constexpr std::string_view kPulledAnswers = "s-pull-answers";  // a response log that is being pulled

// Next step if the host of a rank does not see the directory of the others.
inline constexpr const char* kShareIt =
    "let the hosts of all ranks share the directory, at the same path, or sleep to host memory";

inline constexpr uint64_t kMostExpansion =
    1024;  // limit of a section's growth by decompression; writers keep to it, readers enforce it

std::string generation_name(uint64_t generation);                    // "g-000042"
std::optional<uint64_t> generation_of(std::string_view entry_name);  // none: another name
// Return whether this is a directory that torpor made for a checkpoint under construction or being removed. Whoever
// holds the lock of the directory of checkpoints may remove it. All else belongs to others, whatever its name.
bool is_leftover(const Entry& entry);

Result<std::vector<uint64_t>> generations_in(const Directory& store);  // committed, oldest first
// Read a file. kCorruption: it is larger than `most` bytes; nothing is allocated then.
Result<Bytes> read_whole(const Directory& directory, std::string_view name, uint64_t most);
Result<OpenedManifest> read_manifest(const Directory& directory, const Key* key = nullptr);
SealPlace section_place(const SectionInfo& info);

}  // namespace torpor
