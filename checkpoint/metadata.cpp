// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/metadata.h"

#include <string_view>

#include <fmt/core.h>
#include <boost/nowide/utf/utf.hpp>

namespace torpor {
namespace {

bool is_utf8(std::string_view text) {
  namespace utf = boost::nowide::utf;
  for (const char* at = text.begin(); at != text.end();) {
    if (!utf::is_valid_codepoint(utf::utf_traits<char>::decode(at, text.end()))) return false;
  }
  return true;
}

}  // namespace

Status check_metadata(const Metadata& metadata, bool to_disk) {
  const auto invalid = [](std::string what) {
    return Error{.code = Code::kInvalidArgument,
                 .what = "metadata: " + std::move(what),
                 .next_step = fmt::format("use at most {} pairs, names of 1 to {} and values of at most {} bytes",
                                          kMostMetadata, kMostMetadataName, kMostMetadataValue)};
  };
  if (!to_disk && !metadata.empty())
    return Error{.code = Code::kInvalidArgument,
                 .what = "metadata goes into a checkpoint, and this sleep writes none",
                 .next_step = "sleep to disk, or leave it out"};
  if (metadata.size() > kMostMetadata) return invalid(fmt::format("there are {} pairs", metadata.size()));
  for (const auto& [name, value] : metadata) {
    if (!is_utf8(name)) return invalid("a name is not UTF-8");
    if (!is_utf8(value)) return invalid(fmt::format("the value of \"{}\" is not UTF-8", name));
    if (name.empty()) return invalid("a name is empty");
    if (name.size() > kMostMetadataName) return invalid(fmt::format("a name has {} bytes", name.size()));
    if (value.size() > kMostMetadataValue)
      return invalid(fmt::format("the value of \"{}\" has {} bytes", name, value.size()));
  }
  return ok();
}

}  // namespace torpor
