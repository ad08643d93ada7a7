// SPDX-License-Identifier: Apache-2.0
// Metadata: names and values that a user attached to a checkpoint, such as the step of a training run. torpor shows
// them and decides nothing by them. They are a section of the checkpoint, so they are sealed as it is.
#pragma once

#include <cstddef>
#include <map>
#include <string>

#include "base/status.h"

namespace torpor {

using Metadata = std::map<std::string, std::string>;

// The limits of `metadata` in the OpenAI API: 16 pairs, names of 64 and values of 512 characters (bytes here).
inline constexpr size_t kMostMetadata = 16;
inline constexpr size_t kMostMetadataName = 64;
inline constexpr size_t kMostMetadataValue = 512;

// kInvalidArgument names the entry that is beyond a limit, whose name is empty, or that is not UTF-8; or says that
// nothing is written `to_disk` that could have it.
Status check_metadata(const Metadata& metadata, bool to_disk = true);

}  // namespace torpor
