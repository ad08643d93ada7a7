// SPDX-License-Identifier: Apache-2.0
#include "remote/owner_record.h"

#include <algorithm>
#include <cctype>
#include <charconv>

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include "remote/checkpoint_index.h"
#include "remote/object_keys.h"

namespace torpor::remote {
namespace {

using Json = nlohmann::ordered_json;
constexpr int kOwnerFormat = 1;
constexpr size_t kDigits = 16;
constexpr uint64_t kMostMilliseconds = 24ull * 3600 * 1000;

bool has_hex_digits(const std::string& text, size_t digits) {
  return text.size() == digits && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

}  // namespace

std::string owner_key(uint64_t number) { return fmt::format("{}{:0{}}", kOwnerPrefix, number, kDigits); }

std::optional<uint64_t> owner_number(std::string_view key) {
  if (!key.starts_with(kOwnerPrefix) || key.size() != kOwnerPrefix.size() + kDigits) return std::nullopt;
  key.remove_prefix(kOwnerPrefix.size());
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), number);
  if (error != std::errc() || end != key.data() + key.size() || number == 0) return std::nullopt;
  return number;
}

bool is_address(std::string_view text) {
  const size_t begin = text.find("://");
  if (begin == std::string_view::npos || (text.substr(0, begin) != "http" && text.substr(0, begin) != "https"))
    return false;
  const std::string_view place = text.substr(begin + 3);
  return !place.empty() && place.size() <= 300 && std::all_of(place.begin(), place.end(), [](unsigned char letter) {
    return std::isalnum(letter) != 0 || std::string_view(".-:[]_").find(static_cast<char>(letter)) != std::string::npos;
  });
}

std::string encode_owner(const OwnerRecord& record) {
  return Json{{"torpor_owner", kOwnerFormat},    {"number", record.number},   {"term", record.term},
              {"holder", record.holder},         {"free", record.free},       {"milliseconds", record.milliseconds},
              {"checkpoint", record.checkpoint}, {"answers", record.answers}, {"address", record.address}}
      .dump();
}

Result<OwnerRecord> decode_owner(std::string_view text, uint64_t number) {
  return try_catch([&]() -> Result<OwnerRecord> {
    const Error damaged{.code = Code::kCorruption,
                        .what = fmt::format("{} is no record of an owner", owner_key(number)),
                        .next_step = "see that nobody serves from this store, then remove what is under owner/"};
    if (text.size() > kMostOwnerBytes) return damaged;
    const Json json = Json::parse(text, nullptr, false);
    if (!json.is_object() || !json.contains("torpor_owner")) return damaged;
    if (json["torpor_owner"] != kOwnerFormat)
      return Error{.code = Code::kIncompatible,
                   .what = fmt::format("{} is of another format", owner_key(number)),
                   .next_step = "use the torpor that wrote it"};
    for (const char* name : {"number", "term", "milliseconds"}) {
      if (!json.contains(name) || !json[name].is_number_unsigned()) return damaged;
    }
    for (const char* name : {"holder", "checkpoint", "answers"}) {
      if (!json.contains(name) || !json[name].is_string()) return damaged;
    }
    if (!json.contains("free") || !json["free"].is_boolean()) return damaged;
    OwnerRecord record{.number = json["number"],
                       .term = json["term"],
                       .holder = json["holder"],
                       .milliseconds = json["milliseconds"],
                       .free = json["free"],
                       .checkpoint = json["checkpoint"],
                       .answers = json["answers"]};
    if (json.contains("address")) {  // older records have none
      if (!json["address"].is_string()) return damaged;
      record.address = json["address"];
      if (!record.address.empty() && !is_address(record.address)) return damaged;
    }
    const bool names = (record.checkpoint.empty() || is_key(index_key(record.checkpoint))) &&
                       (record.answers.empty() || has_hex_digits(record.answers, 64));
    if (record.number != number || !has_hex_digits(record.holder, 32) || record.milliseconds > kMostMilliseconds ||
        !names)
      return damaged;
    return record;
  });
}

}  // namespace torpor::remote
