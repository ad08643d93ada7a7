// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/metadata.h"

#include <string_view>

#include <fmt/core.h>

namespace torpor {
namespace {

// RFC 3629: the shortest form, no surrogates, nothing beyond U+10FFFF.
bool is_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const auto first = static_cast<unsigned char>(text[at]);
    const size_t bytes = first < 0x80   ? 1
                         : first < 0xc2 ? 0
                         : first < 0xe0 ? 2
                         : first < 0xf0 ? 3
                         : first < 0xf5 ? 4
                                        : 0;
    if (bytes == 0 || bytes > text.size() - at) return false;
    for (size_t i = 1; i < bytes; ++i) {
      const auto next = static_cast<unsigned char>(text[at + i]);
      const unsigned char least = i > 1 ? 0x80 : first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
      const unsigned char most = i > 1 ? 0xbf : first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
      if (next < least || next > most) return false;
    }
    at += bytes;
  }
  return true;
}

}  // namespace

Status check_metadata(const Metadata& metadata) {
  const auto invalid = [](std::string what) {
    return Error{.code = Code::kInvalidArgument,
                 .what = "metadata: " + std::move(what),
                 .next_step = fmt::format("use at most {} pairs, names of 1 to {} and values of at most {} bytes",
                                          kMostMetadata, kMostMetadataName, kMostMetadataValue)};
  };
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
