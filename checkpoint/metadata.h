// SPDX-License-Identifier: Apache-2.0
// Metadata: names and values that a user attached to a checkpoint, such as the step of a training run. A value is text,
// or any other value of JSON: a number, a boolean, null, a list, an object. torpor shows them and bases no decision on
// them. They are a section of the checkpoint, so they are sealed with it.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "base/status.h"

namespace torpor {

struct MetadataValue {
  MetadataValue() = default;
  MetadataValue(std::string text) : words(std::move(text)) {}  // NOLINT(google-explicit-constructor)
  MetadataValue(const char* text) : words(text) {}             // NOLINT(google-explicit-constructor)
  static MetadataValue json(std::string words) {
    MetadataValue value(std::move(words));
    value.is_json = true;
    return value;
  }
  // Return the value as JSON: text with quotes.
  std::string to_json() const;
  // Return the value that these words of JSON have; a string becomes text. kInvalidArgument: they are no JSON, no
  // UTF-8, or have more than kMostMetadataDepth levels.
  static Result<MetadataValue> from_json(std::string_view words);

  std::string words;
  bool is_json = false;  // `words` is JSON, not text
  friend bool operator==(const MetadataValue&, const MetadataValue&) = default;
};
using Metadata = std::map<std::string, MetadataValue>;

// The limits of `metadata` in the OpenAI API: 16 pairs, names of 64 and values of 512 characters (here: bytes).
inline constexpr size_t kMostMetadata = 16;
inline constexpr size_t kMostMetadataName = 64;
inline constexpr size_t kMostMetadataValue = 512;
inline constexpr size_t kMostMetadataDepth = 8;  // levels of lists and objects

// Check the limits. kInvalidArgument: an entry is beyond a limit, has an empty name, is not UTF-8, or not JSON; or
// there is metadata but `to_disk` is false, so that no checkpoint could hold it. The error names the entry.
Status check_metadata(const Metadata& metadata, bool to_disk = true);

}  // namespace torpor
