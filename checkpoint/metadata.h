// SPDX-License-Identifier: Apache-2.0
// Metadata: names and values that a user attached to a checkpoint, such as the step of a training run. torpor shows
// them and bases no decision on them. They are a section of the checkpoint, so they are sealed with it.
#pragma once

#include <cstddef>
#include <map>
#include <string>

#include "base/status.h"

namespace torpor {

using Metadata = std::map<std::string, std::string>;

// The limits of `metadata` in the OpenAI API: 16 pairs, names of 64 and values of 512 characters (here: bytes).
inline constexpr size_t kMostMetadata = 16;
inline constexpr size_t kMostMetadataName = 64;
inline constexpr size_t kMostMetadataValue = 512;

// Check the limits. kInvalidArgument: an entry is beyond a limit, has an empty name, or is not UTF-8; or there is
// metadata but `to_disk` is false, so that no checkpoint could hold it. The error names the entry.
Status check_metadata(const Metadata& metadata, bool to_disk = true);

}  // namespace torpor
