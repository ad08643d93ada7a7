// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/metadata.h"

#include <string_view>

#include <fmt/core.h>
#include <boost/nowide/utf/utf.hpp>
#include <nlohmann/json.hpp>

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

std::string MetadataValue::to_json() const {
  return is_json ? words : nlohmann::json(words).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Result<MetadataValue> MetadataValue::from_json(std::string_view words) {
  const auto wrong = [](std::string what) {
    return Error{.code = Code::kInvalidArgument, .what = std::move(what), .next_step = "give a value of JSON"};
  };
  using nlohmann::json;
  // Its parser ends at a zero byte and skips a byte order mark, which other parsers of JSON refuse.
  if (words.find('\0') != std::string_view::npos || words.starts_with("\xEF\xBB\xBF"))
    return wrong("a value is no JSON");
  bool deep = false;
  const auto look = [&](int depth, json::parse_event_t event, json&) {
    const bool begins = event == json::parse_event_t::object_start || event == json::parse_event_t::array_start;
    deep = deep || depth + (begins ? 1 : 0) > static_cast<int>(kMostMetadataDepth);
    return !deep;
  };
  const json value = json::parse(words, look, false);
  if (deep) return wrong(fmt::format("a value has more than {} levels", kMostMetadataDepth));
  if (value.is_discarded()) return wrong("a value is no JSON");
  if (value.is_string()) return MetadataValue(value.get<std::string>());
  return MetadataValue::json(std::string(words));
}

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
    if (!is_utf8(value.words)) return invalid(fmt::format("the value of \"{}\" is not UTF-8", name));
    if (name.empty()) return invalid("a name is empty");
    if (name.size() > kMostMetadataName) return invalid(fmt::format("a name has {} bytes", name.size()));
    if (value.words.size() > kMostMetadataValue)
      return invalid(fmt::format("the value of \"{}\" has {} bytes", name, value.words.size()));
    if (!value.is_json) continue;
    if (const Result<MetadataValue> json = MetadataValue::from_json(value.words); !json)
      return invalid(fmt::format("of \"{}\" {}", name, json.error().what));
  }
  return ok();
}

}  // namespace torpor
