// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/metadata.h"

#include <fmt/core.h>

namespace torpor {

Status check_metadata(const Metadata& metadata) {
  const auto invalid = [](std::string what) {
    return Error{.code = Code::kInvalidArgument,
                 .what = "metadata: " + std::move(what),
                 .next_step = fmt::format("use at most {} pairs, names of 1 to {} and values of at most {} bytes",
                                          kMostMetadata, kMostMetadataName, kMostMetadataValue)};
  };
  if (metadata.size() > kMostMetadata) return invalid(fmt::format("there are {} pairs", metadata.size()));
  for (const auto& [name, value] : metadata) {
    if (name.empty()) return invalid(fmt::format("the name of \"{}\" is empty", value.substr(0, kMostMetadataName)));
    if (name.size() > kMostMetadataName)
      return invalid(fmt::format("the name \"{}…\" has {} bytes", name.substr(0, kMostMetadataName), name.size()));
    if (value.size() > kMostMetadataValue)
      return invalid(fmt::format("the value of \"{}\" has {} bytes", name, value.size()));
  }
  return ok();
}

}  // namespace torpor
